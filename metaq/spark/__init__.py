"""The Spark source and sink; importing the package itself takes no Spark, no Arrow."""
