"""ZooKeeper coordination; kazoo is seen in `_kazoo.py` and `_kazoo_client.py`."""
