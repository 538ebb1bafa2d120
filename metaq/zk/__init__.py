"""ZooKeeper coordination.

Only `coordinator.py`, `_connection.py` and `servers.py` import kazoo, for its encoding.
"""
