"""Test rigs: files, brokers, processes and strategies that many tests share."""
