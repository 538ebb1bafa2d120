"""ZooKeeper coordination; kazoo is seen in `_kazoo.py` only."""
