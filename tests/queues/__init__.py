"""Tests of `metaq/queues/`."""
