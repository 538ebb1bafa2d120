"""`metaq stats`: counters of brokers."""

from typing import Final

import click

from metaq.cli import render
from metaq.cli.cluster import Target
from metaq.client.cluster.context import ClientContext
from metaq.client.consume.browse import parse_stats
from metaq.client.fan_out import for_each
from metaq.errors import MetaqError, NoBrokerError
from metaq.model import BrokerId
from metaq.peer.replies import require_ok
from metaq.protocol.commands import Stats

RAW_ITEMS: Final = {"config"}
"""Items whose text is not lines of names and values."""
ITEMS: Final = ("topics", "offsets", "realtime", "config", "help")
"""Items that are no topics."""
UNKNOWN: Final = "1"
"""Value of `resultCode` where a broker knows no topic of that name."""


def stats(target: Target, item: str, *, as_json: bool) -> bool:
    """Print one item of every broker.

    Returns:
        False when a broker could not be asked; the others have been.

    Raises:
        NoBrokerError: there is no broker at all, or none that knows the topic.
    """

    async def ask_all(
        context: ClientContext, deadline_s: float
    ) -> dict[BrokerId, tuple[str, str | MetaqError]]:
        async def ask(broker_id: BrokerId) -> str:
            address = context.address_of(broker_id)
            if address is None:
                raise NoBrokerError("the broker is gone")
            connection = await context.pool.get(address, deadline_s=deadline_s)
            question = Stats(item, connection.next_opaque())
            reply = await connection.call(question, deadline_s=deadline_s)
            return require_ok(reply).text

        told = await for_each(ask, context.metadata.snapshot.brokers)
        return {
            broker_id: (str(context.address_of(broker_id)), text)
            for broker_id, text in told.items()
        }

    told = target.run(ask_all)
    target.require_brokers(told)
    if all(_is_unknown(text) for _address, text in told.values()):
        raise NoBrokerError(
            f"no broker knows a topic '{item}'; other items are {', '.join(ITEMS)}"
        )
    for broker_id, (address, text) in told.items():
        if isinstance(text, MetaqError):
            render.say(f"broker {broker_id}: {text}")
        elif as_json:
            value: dict[str, object] = {"broker": broker_id, "address": address}
            value["stats"] = text if item in RAW_ITEMS else parse_stats(text)
            render.print_json(value)
        else:
            if len(told) > 1:
                click.echo(f"# broker {broker_id} {address}")
            click.echo(render.printable_lines("\n".join(text.splitlines())))
    return not any(isinstance(text, MetaqError) for _address, text in told.values())


def _is_unknown(text: str | MetaqError) -> bool:
    return isinstance(text, str) and parse_stats(text).get("resultCode") == UNKNOWN
