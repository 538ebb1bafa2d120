"""What an operator asks of a cluster, and changes in it."""
