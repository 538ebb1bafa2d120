"""Transactions on the broker's side: journal, recovery, coordinator."""
