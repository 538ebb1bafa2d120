"""What a query writes: rows to brokers, in named batches."""
