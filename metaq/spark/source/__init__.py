"""What a query reads: batches and streams of topics."""
