"""`metaq txn`: list the transactions of a broker on this machine; end them."""

import re
import uuid
from collections.abc import Iterable
from pathlib import Path
from typing import Final, NamedTuple

import click

from metaq.cli import render
from metaq.cli.admin import ask
from metaq.cli.cluster import Target
from metaq.cli.tree import command, group
from metaq.client import AsyncClient, SettledGroup

COLUMNS: Final = ("key", "state", "puts", "bytes", "age", "prepared", "partitions")

NAME: Final = re.compile(r"(?:XID:.*:)?((sink|write|group)-([^:/]+))")
"""Name of an exactly-once write of Spark or of a group, alone or at the end of a
key."""


class End(NamedTuple):
    """A way to end a transaction by command."""

    help: str
    """Help of the command."""
    done: str


ENDS: Final = {
    "commit": End(
        "Commit the prepared transaction KEY; its coordinator gets code 7.", "committed"
    ),
    "rollback": End(
        "Roll back the prepared transaction KEY; its coordinator gets code 6.",
        "rolled back",
    ),
    "complete": End(
        "Drop the prepared transaction KEY, which was ended by other means.\n\nIts"
        " coordinator gets code 8.",
        "dropped",
    ),
    "forget": End("Forget the decision that a command made about KEY.", "forgotten"),
}

group("txn", "List transactions of a broker; resolve those in doubt.")


@command("txn list", examples=("metaq txn list",))
def list_transactions(data_dir: Path, *, as_json: bool) -> None:
    """List unfinished transactions and those ended by a command.

    The latter are listed until they are forgotten.
    """
    transactions = ask(data_dir, "transactions")["transactions"]
    if as_json:
        # Ages are in milliseconds; null if unknown.
        for each in transactions:
            render.print_json(each)
        return
    rows: list[list[render.Cell]] = []
    for each in transactions:
        prepared_ms = each["prepared_age_ms"]
        partitions = ", ".join(each["partitions"])
        rows.append(
            [
                each["key"],
                each["state"],
                each["put_count"],
                each["size_bytes"],
                f"{each['age_ms'] // 1000} s",
                "-" if prepared_ms is None else f"{prepared_ms // 1000} s",
                f"{partitions} {each['detail']}".strip(),
            ]
        )
    render.print_rows(COLUMNS, rows, as_json=False)
    keys = [each["key"] for each in transactions]
    for name in spark_names(keys):
        click.echo(f"{name} is a write of Spark; if its driver is gone for good:")
        click.echo(f"  metaq txn settle {name}")
    for name, members in group_members(keys).items():
        click.echo(
            f"group-{name} belongs to group {name}, members {', '.join(members)}, which"
            " writes exactly once; the next consumer of the group ends it, or:"
        )
        click.echo(f"  metaq txn settle group-{name}")


def spark_names(keys: Iterable[str]) -> list[str]:
    """Return the names of the Spark writes that keys belong to, each once."""
    found = filter(None, map(NAME.fullmatch, keys))
    return list(dict.fromkeys(name[1] for name in found if name[2] != "group"))


def group_members(keys: Iterable[str]) -> dict[str, list[str]]:
    """Return each group that keys belong to → its members, each once."""
    from metaq.model import XaTransactionId
    from metaq.protocol.transaction_ids import parse_key
    from metaq.zk.decisions import parse_batch_xid

    found: dict[str, dict[str, None]] = {}
    for xid in map(parse_key, keys):
        name = parse_batch_xid(xid) if isinstance(xid, XaTransactionId) else None
        if name is not None:
            found.setdefault(name.group, {})[name.member] = None
    return {group: list(members) for group, members in found.items()}


@command(
    "txn settle",
    click.argument("key", metavar="NAME"),
    examples=("metaq txn settle write-0f8fad5bd9cb469fa16570867728950e",),
)
def settle(target: Target, key: str) -> None:
    """Settle the unfinished transactions of an exactly-once write or group.

    For a Spark write whose driver is gone and will not be started again, or for dead
    members of a group that writes exactly once. At all brokers, transactions that
    ZooKeeper records as decided are committed, and the others rolled back. NAME is the
    end of a key in 'metaq txn list'.
    """
    match = NAME.fullmatch(key)
    if match is None:
        raise click.BadParameter(
            f"expected sink-... or write-..., or group-..., got {key[:80]!r}"
        )
    name, kind, group_name = match.groups()
    if kind == "group":
        _settle_group(target, group_name)
        return
    from metaq.spark.sink.decisions import Decision
    from metaq.spark.sink.exactly_once import settle_write

    async def work(client: AsyncClient) -> Decision | None:
        await target.find_brokers(client.admin())
        return await settle_write(
            client,
            name,
            is_batch_write=kind == "write",
            draw_turn=lambda: uuid.uuid4().hex,
        )

    decision = target.run(work)
    if decision is None:
        click.echo(f"{name}: nothing was decided, and nothing is prepared any more")
    else:
        click.echo(f"{name}: batch {decision.batch} was decided, and is committed")


def _settle_group(target: Target, group: str) -> None:
    async def work(client: AsyncClient) -> SettledGroup:
        await target.find_brokers(client.admin())
        return await client.admin().settle_group(group)

    settled = target.run(work)
    click.echo(
        f"group {group}: {settled.committed} branches of dead members were decided,"
        f" and are committed; {settled.rolled_back} were not, and are rolled back"
    )
    for member, count in settled.living.items():
        click.echo(f"{count} are of {member}, which is alive and ends them")


def _add_end(word: str) -> None:
    def end(key: str, data_dir: Path) -> None:
        ask(data_dir, "end_transaction", key=key, **{"as": word})
        click.echo(f"{key}: {ENDS[word].done}")

    end.__doc__ = ENDS[word].help
    line = f"metaq txn {word} XID:1:0a:0b:billing-1"
    command(f"txn {word}", click.argument("key"), examples=(line,))(end)


for _word in ENDS:
    _add_end(_word)
