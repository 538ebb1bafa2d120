"""The bytes of one message record, shared by broker, client and tools."""
