"""Access to a broker: connections, replies and raw bytes of logs; knows no client."""
