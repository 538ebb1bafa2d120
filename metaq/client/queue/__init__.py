"""Queue groups: messages that are taken from brokers, handed out, and settled."""
