"""Sink of a query: rows to brokers, in named batches."""
