"""Test rigs: file systems, brokers, processes and strategies that tests share."""
