"""Which partitions a member reads: assignments and rebalances."""
