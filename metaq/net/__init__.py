"""Sockets and listeners; knows no topics and no partitions."""
