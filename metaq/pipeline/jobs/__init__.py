"""Pipeline jobs on Spark, as Python functions."""
