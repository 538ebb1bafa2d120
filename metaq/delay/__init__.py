"""Delayed messages: their records, the index by due time, rules of delivery."""
