"""Tests of `metaq/filter/`."""
