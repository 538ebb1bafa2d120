"""Floor programs: the same system calls as the broker's, and nothing else."""
