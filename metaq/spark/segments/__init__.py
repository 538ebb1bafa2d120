"""`format("metaq-segments")`: reads segment files directly from disk."""
