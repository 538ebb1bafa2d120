"""Membership in a group: assignments and rebalances."""
