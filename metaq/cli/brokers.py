"""`metaq brokers` and `metaq stats`: present and missing brokers, and their state."""

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import click

from metaq.cli import render
from metaq.cli.admin import ask
from metaq.cli.cluster import Target
from metaq.cli.tree import ListingGroup, command
from metaq.client import AsyncAdmin, BrokerDescription, MetaqError, NoBrokerError
from metaq.peer.replies import parse_stats

COLUMNS = (
    "broker", "address", "state", "leader", "followers", "topics", "partitions",
)  # fmt: skip
RAW_ITEMS: Final = {"config"}
"""Items whose text does not consist of lines with names and values."""
ITEMS: Final = ("topics", "offsets", "realtime", "config", "help")
"""Items that are not topics."""
UNKNOWN: Final = "1"
"""Value of `resultCode` for an unknown topic."""
LOG_COLUMNS: Final = (
    "topic", "partition", "state", "is_closed", "log_start", "high_watermark",
    "size_bytes", "segment_count", "damage",
)  # fmt: skip
DIRECTORY_COLUMNS: Final = (
    "path", "state", "offline_cause", "size_bytes", "free_bytes", "is_low_on_space",
    "is_silent", "is_read_only",
)  # fmt: skip


@command("brokers", examples=("metaq brokers",), cls=ListingGroup)
def list_brokers(target: Target, *, as_json: bool) -> bool:
    """List registered and missing brokers; inspect or forget one.

    A broker is missing if ZooKeeper has a record of it but it is not registered. Java
    brokers have no record. The exit code is 1 if a broker is missing.
    """
    found = target.ask(lambda admin: admin.brokers())
    if not found:
        raise target.no_broker()
    _print(found, as_json=as_json)
    return all(each.is_present for each in found)


@command(
    "brokers forget",
    click.argument("number", metavar="BROKER", type=click.IntRange(0)),
    examples=("metaq brokers forget 3 --dry-run", "metaq brokers forget 3 --yes"),
)
def forget(
    target: Target, number: int, *, is_dry: bool, is_sure: bool, as_json: bool
) -> None:
    """Remove from ZooKeeper a broker that is gone for good.

    Afterwards reads no longer expect the partitions of BROKER, and the offsets that
    groups have committed there are deleted. Its stored data is not touched: a broker
    that comes back is recorded again. Refused if the broker is registered.
    """

    async def plan(admin: AsyncAdmin) -> tuple[BrokerDescription, dict[str, int]]:
        found = await admin.forget_broker(number, plan=True)
        groups = await admin.groups()
        offsets = await asyncio.gather(*map(admin.committed_offsets, groups))
        counts = [sum(p.broker_id == number for p in each) for each in offsets]
        return found, {g: n for g, n in zip(groups, counts, strict=True) if n}

    found, counts = target.ask(plan)
    _print((found,), as_json=as_json)
    count = render.count_text(sum(counts.values()), "committed offset")
    render.say(f"groups with offsets there: {', '.join(counts) or 'none'}")
    question = (
        f"Forget broker {number}, its"
        f" {render.count_text(found.partition_count, 'partition')} and {count} of"
        " groups? Reads will no longer expect these partitions."
    )
    if render.may_change(question, is_dry=is_dry, is_sure=is_sure):
        target.ask(lambda admin: admin.forget_broker(number))
        render.say(f"broker {number} is forgotten")


def _print(found: tuple[BrokerDescription, ...], *, as_json: bool) -> None:
    rows: list[tuple[render.Cell, ...]] = [
        (
            each.broker_id,
            str(each.address) if each.address else None,
            "present" if each.is_present else "missing",
            each.has_leader,
            ",".join(map(str, each.followers)) or None,
            each.topic_count,
            each.partition_count,
        )
        for each in found
    ]
    marks = [not each.is_present for each in found]
    render.print_rows(COLUMNS, rows, as_json=as_json, marks=marks)


# -- one on this machine -------------------------------------------------------------


@command(
    "brokers status", examples=("metaq brokers status", "metaq brokers status --json")
)
def status(data_dir: Path, *, as_json: bool) -> bool:
    """Print the identity, state and alarms of a broker on this machine.

    The exit code is 1 if an alarm is failing; /health answers 503 then.
    """
    reply = ask(data_dir, "status")
    problems = reply.pop("problems")
    if as_json:
        render.print_json({**reply, "problems": problems})
    else:
        for name, value in reply.items():
            click.echo(f"{name} {render.printable_lines(str(value))}")
        if problems:
            click.echo()
            _print_objects(("severity", "alarm", "text"), problems, as_json=False)
    return all(each["severity"] != "failing" for each in problems)


@command("brokers logs", examples=("metaq brokers logs", "metaq brokers logs --json"))
def logs(data_dir: Path, *, as_json: bool) -> bool:
    """Print the partition logs of a broker on this machine.

    Prints offsets, size, state and damage of each log; --json prints all fields. The
    exit code is 1 if a log is damaged.
    """
    found = ask(data_dir, "logs")["logs"]
    marks = [bool(each["damage"]) for each in found]
    if not as_json:
        found = [
            {**each, "damage": "; ".join(each["damage"]) or None} for each in found
        ]
    _print_objects(LOG_COLUMNS, found, as_json=as_json, marks=marks)
    return not any(marks)


@command("brokers directories", examples=("metaq brokers directories",))
def directories(data_dir: Path, *, as_json: bool) -> bool:
    """Print the data directories of a broker on this machine.

    The exit code is 1 if a directory is offline, silent, read-only or low on space.
    """
    found = ask(data_dir, "directories")["directories"]
    signs = "is_silent", "is_low_on_space", "is_read_only"
    marks = [each["state"] != "online" or any(map(each.get, signs)) for each in found]
    _print_objects(DIRECTORY_COLUMNS, found, as_json=as_json, marks=marks)
    return not any(marks)


@command("brokers scrub", examples=("metaq brokers scrub",))
def scrub(data_dir: Path, *, as_json: bool) -> bool:
    """Print the progress of the background verification (scrub).

    The exit code is 1 if it has found damage.
    """
    reply = ask(data_dir, "scrub")
    if as_json:
        render.print_json(reply)
    elif not reply["is_on"]:
        click.echo("the scrub is off: scrubBytesPerS is 0")
    else:
        at = "waiting for the next pass"
        if reply["log"]:
            at = f"now at {reply['log']}, offset {reply['offset']}"
        click.echo(
            f"pass {reply['passes'] + 1}:"
            f" {render.bytes_text(reply['checked_bytes'])} of"
            f" {render.bytes_text(reply['total_bytes'])} checked, {at};"
            f" {render.count_text(reply['damage_count'], 'damaged range')}"
        )
    return not reply.get("damage_count")


def _print_objects(
    columns: Sequence[str],
    found: Sequence[Mapping[str, Any]],
    *,
    as_json: bool,
    marks: Sequence[bool] = (),
) -> None:
    """Print objects of a broker: as JSON, or some of their fields as a table."""
    if as_json:
        for each in found:
            render.print_json(each)
        return
    rows = [[each[name] for name in columns] for each in found]
    render.print_rows(columns, rows, as_json=False, marks=marks)


# -- counters -------------------------------------------------------------------------


@command(
    "stats",
    click.argument("item", default=""),
    examples=(
        "metaq stats",
        "metaq stats topics --json",
        "metaq stats realtime --broker localhost:8123",
    ),
)
def stats(target: Target, item: str, *, as_json: bool) -> bool:
    """Print statistics of brokers.

    ITEM is topics, offsets, realtime, config, help or the name of a topic; without it,
    each broker prints general statistics.
    """

    async def ask_all(
        admin: AsyncAdmin,
    ) -> list[tuple[BrokerDescription, str | MetaqError]]:
        async def ask(broker: BrokerDescription) -> str | MetaqError:
            try:
                return await admin.broker_stats(broker.broker_id or 0, item)
            except MetaqError as error:
                return error

        there = await target.find_brokers(admin)
        texts = await asyncio.gather(*map(ask, there))
        return list(zip(there, texts, strict=True))

    answers = target.ask(ask_all)
    if all(_is_unknown(text) for _broker, text in answers):
        raise NoBrokerError(
            f"no broker knows a topic '{item}'; other items are {', '.join(ITEMS)}"
        )
    for broker, text in answers:
        broker_id, address = broker.broker_id, str(broker.address)
        if isinstance(text, MetaqError):
            render.say(f"broker {broker_id}: {text}")
        elif as_json:
            value: dict[str, object] = {"broker": broker_id, "address": address}
            value["stats"] = text if item in RAW_ITEMS else parse_stats(text)
            render.print_json(value)
        else:
            if len(answers) > 1:
                click.echo(f"# broker {broker_id} {address}")
            click.echo(render.printable_lines("\n".join(text.splitlines())))
    return not any(isinstance(text, MetaqError) for _broker, text in answers)


def _is_unknown(text: str | MetaqError) -> bool:
    return isinstance(text, str) and parse_stats(text).get("resultCode") == UNKNOWN
