"""From a message to its receipt: accumulator, partition senders and transactions."""
