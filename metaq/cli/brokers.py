"""`metaq brokers` and `metaq stats`: brokers there are, or were, and their counters."""

from typing import Final

import click

from metaq.cli import render
from metaq.cli.cluster import Target
from metaq.client.admin.cluster_admin import (
    BrokerDescription,
    brokers,
    forget_broker,
    plan_forget,
)
from metaq.client.cluster.context import ClientContext
from metaq.client.consume.browse import parse_stats
from metaq.client.fan_out import for_each
from metaq.errors import MetaqError, NoBrokerError
from metaq.model import BrokerId
from metaq.peer.replies import require_ok
from metaq.protocol.commands import Stats

COLUMNS = (
    "broker", "address", "state", "leader", "followers", "topics", "partitions",
)  # fmt: skip
RAW_ITEMS: Final = {"config"}
"""Items whose text is not lines of names and values."""
ITEMS: Final = ("topics", "offsets", "realtime", "config", "help")
"""Items that are no topics."""
UNKNOWN: Final = "1"
"""Value of `resultCode` where a broker knows no topic of that name."""


def list_brokers(target: Target, *, as_json: bool) -> bool:
    """Print one row per broker, those that are missing too.

    Returns:
        False when one is missing.

    Raises:
        NoBrokerError: there is none at all.
    """

    async def look(
        context: ClientContext, deadline_s: float
    ) -> tuple[BrokerDescription, ...]:
        return await brokers(context, deadline_s=deadline_s)

    found = target.run(look)
    if not found:
        target.require_brokers(())
    _print(found, as_json=as_json)
    return all(each.is_present for each in found)


def forget(
    target: Target, number: int, *, is_dry: bool, is_sure: bool, as_json: bool
) -> None:
    """Take a broker that is gone for good out of the catalog.

    Args:
        target: which cluster.
        number: the broker's id.
        is_dry: only print the records that would be deleted.
        is_sure: do not ask.
        as_json: the row as an object.

    Raises:
        BrokerRegisteredError: it is there.
        ClientError: there is no record of it.
        click.Abort: the user does not want it after all.
    """
    broker_id = BrokerId(number)

    async def plan(context: ClientContext, deadline_s: float) -> BrokerDescription:
        return await plan_forget(context, broker_id, deadline_s=deadline_s)

    async def carry_out(context: ClientContext, deadline_s: float) -> None:
        await forget_broker(context, broker_id, deadline_s=deadline_s)

    found = target.run(plan)
    _print((found,), as_json=as_json)
    if is_dry:
        render.say("dry run: nothing was removed")
        return
    if not is_sure:
        click.confirm(
            f"Forget broker {number} and its"
            f" {render.count_text(found.partition_count, 'partition')}? Reads will not"
            " miss them any more",
            abort=True,
            err=True,
        )
    target.run(carry_out)
    render.say(f"broker {number} is forgotten")


def _print(found: tuple[BrokerDescription, ...], *, as_json: bool) -> None:
    marked = [index for index, each in enumerate(found) if not each.is_present]
    rows = [_row(each) for each in found]
    render.print_rows(COLUMNS, rows, as_json=as_json, marked=marked)


def _row(each: BrokerDescription) -> tuple[render.Cell, ...]:
    return (
        each.broker_id,
        str(each.address) if each.address else None,
        "present" if each.is_present else "missing",
        each.has_leader,
        ",".join(map(str, each.followers)) or None,
        each.topic_count,
        each.partition_count,
    )


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
