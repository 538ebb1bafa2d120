"""`metaq stats`: what brokers count."""

import click

from metaq.cli import render
from metaq.cli.cluster import Target
from metaq.client.wire import WireConnection
from metaq.clock import SystemClock
from metaq.errors import MetaqError, NoBrokerError

RAW_ITEMS = {"config"}
"""Items whose text is not lines of names and values."""


def stats(target: Target, item: str, *, as_json: bool) -> bool:
    """Print one item of every broker.

    Returns:
        False when a broker could not be asked; the others have been.

    Raises:
        NoBrokerError: there is no broker at all.
    """
    cluster = target.read()
    if not cluster.brokers:
        raise NoBrokerError("no broker is registered")
    is_fine = True
    for broker_id, address in cluster.brokers.items():
        try:
            with WireConnection.open(
                address, timeout_s=target.timeout_s, clock=SystemClock()
            ) as connection:
                text = connection.stats(item, timeout_s=target.timeout_s)
        except MetaqError as error:
            render.say(f"broker {broker_id}: {error}")
            is_fine = False
            continue
        if as_json:
            value: dict[str, object] = {"broker": broker_id, "address": str(address)}
            value["stats"] = text if item in RAW_ITEMS else parse_stats(text)
            render.print_json(value)
        else:
            if len(cluster.brokers) > 1:
                click.echo(f"# broker {broker_id} {address}")
            click.echo("\n".join(text.splitlines()))
    return is_fine


def parse_stats(text: str) -> dict[str, str]:
    """Return the lines between STATS and END as name → value (broker spec 7.1)."""
    lines = [line for line in text.splitlines() if line not in {"STATS", "END"}]
    return {
        name: value for name, _space, value in (line.partition(" ") for line in lines)
    }
