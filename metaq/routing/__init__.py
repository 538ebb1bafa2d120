"""Routing without I/O: the topics that a message of an exchange goes to."""
