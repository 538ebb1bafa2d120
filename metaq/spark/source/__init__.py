"""The Spark source: batch and streaming reads of topics."""
