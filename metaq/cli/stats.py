"""`metaq stats`: what brokers count."""

from typing import Final

import click

from metaq.cli import render
from metaq.cli.cluster import Target
from metaq.client.browse import parse_stats
from metaq.client.context import ClientContext
from metaq.client.fan_out import for_each
from metaq.client.replies import require_ok
from metaq.errors import MetaqError, NoBrokerError
from metaq.model import BrokerId
from metaq.protocol.commands import Stats

RAW_ITEMS: Final = {"config"}
"""Items whose text is not lines of names and values."""


def stats(target: Target, item: str, *, as_json: bool) -> bool:
    """Print one item of every broker.

    Returns:
        False when a broker could not be asked; the others have been.

    Raises:
        NoBrokerError: there is no broker at all.
    """

    async def ask_all(
        context: ClientContext, deadline_s: float
    ) -> dict[BrokerId, tuple[str, str | MetaqError]]:
        async def ask(broker_id: BrokerId) -> str:
            address = context.address_of(broker_id)
            if address is None:
                raise NoBrokerError("it is gone")
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
            click.echo("\n".join(text.splitlines()))
    return not any(isinstance(text, MetaqError) for _address, text in told.values())
