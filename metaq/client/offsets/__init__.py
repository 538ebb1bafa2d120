"""Offsets of groups: stores, commits and offset reset."""
