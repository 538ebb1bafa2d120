"""Routing without I/O: which topics a message of an exchange goes to."""
