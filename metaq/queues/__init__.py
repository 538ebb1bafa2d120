"""Queue groups without I/O: the state of one queue, and its stored records."""
