"""Fakes, embedded servers and a proxy, for our tests and those of users."""
