"""Replica sets: elections, streams from a leader to its followers, and their rules."""
