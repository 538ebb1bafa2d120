"""`metaq request`: send a request to the responders of a topic; print the reply."""

import sys

import click

from metaq.cli import render
from metaq.cli.cluster import Target
from metaq.cli.options import UTF8, check_tag, headers_option, topic_argument
from metaq.cli.tree import command
from metaq.model import HeaderPairs


@command(
    "request",
    topic_argument,
    click.argument("data"),
    click.option(
        "--key", type=UTF8, help="Key of the request, which selects the partition."
    ),
    headers_option,
    click.option(
        "--tag", type=UTF8, help="Tag of the request, for responders with a filter."
    ),
    examples=(
        "metaq request prices ACME",
        "metaq request prices ACME --timeout 2 --header client=web",
    ),
)
def request(
    target: Target,
    topic: str,
    data: str,
    key: str | None,
    headers: HeaderPairs,
    tag: str | None,
    *,
    as_json: bool,
) -> None:
    """Send DATA as a request to TOPIC; print the reply, followed by a newline.

    The exit code is 1 if no reply arrives within --timeout, or if the handler failed.
    """
    check_tag(tag, headers)
    with target.client() as client:
        reply = client.request(
            topic,
            data.encode(errors="surrogateescape"),
            key=key,
            headers=headers,
            tag=tag,
            timeout=target.timeout_s,
        )
    if as_json:
        render.print_json({"topic": topic, **render.text_or_base64("data", reply)})
    else:
        sys.stdout.buffer.write(reply + b"\n")
