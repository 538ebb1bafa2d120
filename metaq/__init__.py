"""MetaQ: a partitioned, durable message log coordinated by ZooKeeper."""

__version__ = "1.0.0.dev0"
