"""Filters of messages: the language of `where` and its evaluation."""
