"""`metaq txn`: transactions of a broker on this machine, and their ends by command."""

import re
import uuid
from collections.abc import Iterable
from pathlib import Path
from typing import Final, NamedTuple

import click

from metaq.broker.admin_socket import call_admin
from metaq.cli import render
from metaq.cli.admin import TIMEOUT_S, find_data_dir
from metaq.cli.cluster import Target
from metaq.cli.options import example, json_option, place_options, target_options
from metaq.client.cluster.context import ClientContext

COLUMNS: Final = ("key", "state", "puts", "bytes", "age", "prepared", "partitions")

SPARK_NAME: Final = re.compile(r"(?:XID:.*:)?((sink|write)-[^:/]+)")
"""Name of an exactly-once write of Spark, alone or as the end of a key."""


def list_transactions(data_dir: Path, *, as_json: bool) -> None:
    """Print every transaction that is not finished, and every heuristic outcome.

    Raises:
        AdminError: no broker runs there, or it refused.
    """
    reply = call_admin(data_dir, {"command": "transactions"}, timeout_s=TIMEOUT_S)
    found = reply.get("transactions")
    transactions = found if isinstance(found, list) else []
    if as_json:
        # Ages as numbers, in milliseconds; null is one that is not known.
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
    for name in spark_names(each["key"] for each in transactions):
        click.echo(f"{name} is a write of Spark; if its driver is gone:")
        click.echo(f"  metaq txn settle {name}")


def spark_names(keys: Iterable[str]) -> list[str]:
    """Return the writes of Spark that keys belong to, each once."""
    found = filter(None, map(SPARK_NAME.fullmatch, keys))
    return list(dict.fromkeys(match[1] for match in found))


def settle_write(target: Target, key: str) -> None:
    """End what a write of Spark has left, as was decided; print which way.

    Args:
        target: its cluster.
        key: name of the write, or key of one of its transactions.

    Raises:
        click.BadParameter: it is neither.
        NoBrokerError: there is no broker.
        MetaqError: not all is ended, or a broker does not say so.
    """
    from metaq.spark.sink.decisions import Decision
    from metaq.spark.sink.exactly_once import TransactionManager

    match = SPARK_NAME.fullmatch(key)
    if match is None:
        raise click.BadParameter(f"expected sink-... or write-..., got {key[:80]!r}")
    name, is_batch_write = match[1], match[2] == "write"

    async def settle(context: ClientContext, deadline_s: float) -> Decision | None:
        target.require_brokers(context.metadata.snapshot.brokers)
        manager = TransactionManager(
            context,
            deadline_s,
            name=name,
            place="",
            draw_turn=lambda: uuid.uuid4().hex,
        )
        decision = await manager.settle()
        if is_batch_write and decision is not None:
            await manager.forget()
        return decision

    decision = target.run(settle)
    if decision is None:
        click.echo(f"{name}: nothing was decided, and nothing is prepared any more")
    else:
        click.echo(f"{name}: batch {decision.batch} was decided, and is committed")


def end_transaction(data_dir: Path, key: str, word: str) -> None:
    """End a prepared transaction, or forget an outcome; print what was done.

    Raises:
        AdminError: no broker runs there, or it refused.
    """
    request = {"command": "end_transaction", "key": key, "as": word}
    call_admin(data_dir, request, timeout_s=TIMEOUT_S)
    click.echo(f"{key}: {ENDS[word].done}")


# -- the commands ---------------------------------------------------------------------


class End(NamedTuple):
    """One way to end a transaction by command."""

    help: str
    """Its help, one sentence."""
    done: str
    """Text printed afterwards."""


ENDS: Final = {
    "commit": End(
        "Commit KEY, which is prepared; code 7 tells its coordinator.", "committed"
    ),
    "rollback": End(
        "Roll back KEY, which is prepared; code 6 tells its coordinator.", "rolled back"
    ),
    "complete": End(
        "Drop KEY, which is prepared and was ended by other means; code 8 tells its"
        " coordinator.",
        "dropped",
    ),
    "forget": End("Forget what was decided about KEY by command.", "forgotten"),
}
"""By the word of the command."""


@click.group()
def txn() -> None:
    """List transactions of a broker, and end those that are in doubt."""


@txn.command(
    "list",
    short_help="List what is not finished, and what was ended by command.",
    epilog=example("metaq txn list"),
)
@json_option
@place_options
def list_command(as_json: bool, data_dir: Path | None, config: Path | None) -> None:
    """List transactions that are not finished, and outcomes that are not forgotten."""
    list_transactions(find_data_dir(data_dir, config), as_json=as_json)


def _end_command(word: str) -> click.Command:
    @click.command(
        word,
        help=ENDS[word].help,
        epilog=example(f"metaq txn {word} XID:1:0a:0b:billing-1"),
    )
    @click.argument("key")
    @place_options
    def command(key: str, data_dir: Path | None, config: Path | None) -> None:
        end_transaction(find_data_dir(data_dir, config), key, word)

    return command


@txn.command(
    "settle",
    short_help="End what a write of Spark has left, as was decided.",
    epilog=example("metaq txn settle write-0f8fad5bd9cb469fa16570867728950e"),
)
@click.argument("name")
@target_options
def settle_command(name: str, target: Target) -> None:
    """End what the exactly-once write NAME has left, at all brokers.

    For one whose driver is gone and is not started again. What ZooKeeper says was
    decided is committed, the rest is rolled back. NAME is the end of a key of
    'metaq txn list'.
    """
    settle_write(target, name)


for _word in ENDS:
    txn.add_command(_end_command(_word))
