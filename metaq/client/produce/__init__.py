"""From a message to its receipt: accumulator, partition queues and senders."""
