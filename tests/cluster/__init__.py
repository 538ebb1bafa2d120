"""Sets of replicas as real processes, with a real ZooKeeper, and what goes wrong."""
