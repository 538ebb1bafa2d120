"""Administration of a cluster: queries and changes by operators."""
