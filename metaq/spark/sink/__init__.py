"""The Spark sink: writes rows to brokers, in named batches or in transactions."""
