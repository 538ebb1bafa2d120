"""One command family per file."""
