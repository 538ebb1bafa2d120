"""Replica sets as pure rules: who leads, what is committed, where copies part."""
