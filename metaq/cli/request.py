"""`metaq request`: one request to the responders of a topic, and its reply."""

import sys

import click

from metaq.cli.cluster import Target
from metaq.cli.options import headers_option
from metaq.cli.tree import command
from metaq.model import HeaderPairs


@command(
    "request",
    click.argument("topic"),
    click.argument("data"),
    click.option("--key", help="Key of the request; it chooses the partition."),
    headers_option,
    examples=(
        "metaq request prices ACME",
        "metaq request prices ACME --timeout 2 --header client=web",
    ),
)
def request(
    target: Target, topic: str, data: str, key: str | None, headers: HeaderPairs
) -> None:
    """Send DATA to the responders of TOPIC; print the reply, followed by a line end.

    Without a reply within --timeout the exit code is 1, also where the handler failed.
    """
    with target.client() as client:
        reply = client.request(
            topic, data.encode(), key=key, headers=headers, timeout=target.timeout_s
        )
    sys.stdout.buffer.write(reply + b"\n")
