"""Fakes and builders for tests, ours and those of users."""
