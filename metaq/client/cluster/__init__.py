"""The cluster as a client sees it: metadata, catalog, and questions to brokers."""
