"""ZooKeeper coordination.

kazoo, its encoding, is seen in `coordinator.py`, `_connection.py` and `servers.py`.
"""
