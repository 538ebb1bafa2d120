"""Spark Declarative Pipelines: run a project again and again, and tell how it goes."""
