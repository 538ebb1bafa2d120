"""The wire protocol without I/O: bytes in, commands and replies out, and back."""
