"""Benchmarks: a floor for each figure, the broker, and the ratio, in one run."""
