"""The argument tree of the `metaq` command."""

import click


@click.group()
def main() -> None:
    """Run and look after a MetaQ message log."""
