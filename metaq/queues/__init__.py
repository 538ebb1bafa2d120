"""Queue groups without I/O: the state of one queue, and how it is kept."""
