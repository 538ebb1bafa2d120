"""The entry point of the command line: `main`, with all of its commands."""

import click

from metaq import __version__
from metaq.cli import (  # noqa: F401  # each adds its commands
    accept_loss,
    admin,
    bench,
    brokers,
    cat,
    consume,
    exchanges,
    find,
    groups,
    hand_over,
    inspect_log,
    offsets,
    pipeline_jobs,
    pipeline_project,
    produce,
    queues,
    redrive,
    replicas,
    request,
    scheduled,
    serve,
    ship,
    topics,
    transactions,
)
from metaq.cli.tree import main

__all__ = ["main"]

click.version_option(__version__, prog_name="metaq")(main)
