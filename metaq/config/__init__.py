"""`server.ini` in MetaQ's format → frozen settings, with every bound named."""
