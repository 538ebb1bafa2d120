"""The entry point of the command line, `main`; commands are loaded on demand."""

# ruff: noqa: F401, PLC0415  # each module adds its commands
import click

from metaq import __version__
from metaq.cli.tree import main

__all__ = ["main"]


def load(name: str) -> None:
    """Load the modules of one command; loading all takes a third of the start time."""
    match name:
        case "accept-loss":
            from metaq.cli import accept_loss
        case "bench":
            from metaq.cli import bench
        case "broker" | "local":
            from metaq.cli import serve
        case "brokers" | "stats":
            from metaq.cli import brokers
        case "cat":
            from metaq.cli import cat
        case "consume":
            from metaq.cli import consume
        case "exchanges":
            from metaq.cli import exchanges
        case "find":
            from metaq.cli import find
        case "groups":
            from metaq.cli import groups
        case "hand-over":
            from metaq.cli import hand_over
        case "offsets":
            from metaq.cli import offsets
        case "partitions" | "reload":
            from metaq.cli import admin
        case "pipeline":
            from metaq.cli import pipeline_jobs, pipeline_project
        case "produce":
            from metaq.cli import produce
        case "queues":
            from metaq.cli import queues, redrive
        case "replicas":
            from metaq.cli import replicas
        case "request":
            from metaq.cli import request
        case "scheduled":
            from metaq.cli import scheduled
        case "ship":
            from metaq.cli import ship
        case "topics":
            from metaq.cli import topics
        case "txn":
            from metaq.cli import transactions
        case "verify" | "dump":
            from metaq.cli import inspect_log


main.load = load
click.version_option(__version__, prog_name="metaq")(main)
