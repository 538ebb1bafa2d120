"""The sync world: clients, producers and consumers for any thread."""
