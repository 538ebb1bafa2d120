"""Floor programs: the broker's system calls, and nothing else."""
