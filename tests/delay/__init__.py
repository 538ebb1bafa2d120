"""Tests of `metaq/delay/`."""
