"""Partition logs on disk: segments, group commit, recovery, retention."""
