"""`format("metaq-segments")`: segment files straight from disk."""
