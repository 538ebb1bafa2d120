"""Filters of messages: the language of `where`, and what it says of a message."""
