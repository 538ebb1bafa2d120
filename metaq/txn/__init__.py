"""The place of the transaction journal; today it holds what storage must offer it."""
