"""Benchmarks: floor, broker and their ratio for each figure, in one run."""
