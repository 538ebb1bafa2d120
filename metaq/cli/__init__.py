"""The `metaq` command."""
