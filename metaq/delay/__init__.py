"""Delayed messages: what is due when, where it waits, what is delivered."""
