"""Decisions of consumers that write exactly once, from topic to topic."""
