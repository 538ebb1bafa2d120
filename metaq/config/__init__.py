"""Parser of `server.ini` in MetaQ's format, with its frozen settings."""
