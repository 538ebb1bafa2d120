"""Source of a query: batches and streams of topics."""
