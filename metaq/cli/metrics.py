"""`--metrics-port`: counters of a command's client, for Prometheus."""

from contextlib import AbstractContextManager, nullcontext

import click

from metaq.client import Client

metrics_option = click.option(
    "--metrics-port",
    type=click.IntRange(0, 65535),
    metavar="PORT",
    help="Answer http://127.0.0.1:PORT/metrics while it runs.  [default: no port]",
)


def serve_while_running(
    client: Client, port: int | None
) -> AbstractContextManager[object]:
    """Answer scrapes inside the block; without a port, do nothing.

    Raises:
        ConfigError: the port cannot be had.
    """
    if port is None:
        return nullcontext()
    from metaq.client.metrics import serve_metrics  # noqa: PLC0415  # rarely wanted

    return serve_metrics(client, port=port)
