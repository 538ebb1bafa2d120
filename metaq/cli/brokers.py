"""`metaq brokers`: which ones there are, which are missing, and forgetting one."""

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
from metaq.model import BrokerId

COLUMNS = (
    "broker", "address", "state", "leader", "followers", "topics", "partitions",
)  # fmt: skip


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
