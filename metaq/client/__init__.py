"""The client library."""
