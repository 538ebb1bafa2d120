"""Orders of an operator to a running broker, each a row of a table and a function.

Orders are only taken by the administration socket (`admin.py`), not by the public port;
`/health` of HTTP has the same answer as `status`. A function reads its fields from the
request, acts, and returns the fields of the answer; an error is one sentence.

Keep in step: the table of commands in `docs/operations.md`.
"""

import logging
import os
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import asdict
from functools import partial
from types import MappingProxyType
from typing import Final, TypeAlias

from metaq.broker.control import Control
from metaq.broker.health import (
    Figures,
    describe_directories,
    describe_health,
    describe_logs,
    describe_scrub,
)
from metaq.broker.status import BrokerStatus
from metaq.config.load import Reload
from metaq.errors import AdminError
from metaq.storage.log_removal import outcome_of
from metaq.txn.state import HeuristicOutcome

ENDS: Final = ("commit", "rollback", "complete", "forget")

_log = logging.getLogger(__name__)

Order: TypeAlias = Callable[[Control, Figures], Awaitable[Figures]]
"""Broker and request → fields of the answer, on the event loop; a `MetaqError` is a
refusal."""


def _describing(describe: Callable[[BrokerStatus], Figures]) -> Order:
    """Return an order that answers with a description of the broker's status."""

    async def order(control: Control, _: Figures) -> Figures:
        return describe(control.status())

    return order


async def _reload(control: Control, _: Figures) -> Figures:
    return _describe_reload(control, await control.reload())


def _describe_reload(control: Control, reload: Reload) -> Figures:
    system = control.context.config.system
    return {
        "broker_id": system.broker_id,
        "address": control.context.address,
        "data_dir": os.path.abspath(system.data_path),
        "added": list(reload.added),
        "removed": list(reload.removed),
        "changed": list(reload.changed),
        "needs_restart": list(reload.needs_restart),
    }


async def _close_partitions(control: Control, request: Figures) -> Figures:
    topic, start, end = _read_partitions(request)
    control.context.topics.close_partitions(topic, start=start, end=end)
    control.context.waiters.end_topic(topic)
    return _closed(control, topic, "closed")


async def _open_partitions(control: Control, request: Figures) -> Figures:
    topic, start, end = _read_partitions(request)
    control.context.topics.open_partitions(topic, start=start, end=end)
    return _closed(control, topic, "opened")


def _closed(control: Control, topic: str, what: str) -> Figures:
    """Log the change; return all closed partitions of the topic."""
    closed = control.context.topics.closed_partitions().get(topic, ())
    _log.info("partitions %s by command: topic=%s closed=%s", what, topic, closed)
    return {"closed": {topic: list(closed)}}


async def _transactions(control: Control, _: Figures) -> Figures:
    views = control.context.transactions.views()
    return {"transactions": [asdict(each) for each in views]}


async def _end_transaction(control: Control, request: Figures) -> Figures:
    """End an XA transaction, even if the request is cancelled."""
    key, word = request.get("key"), request.get("as")
    if not isinstance(key, str) or not isinstance(word, str) or word not in ENDS:
        raise AdminError(f"expected 'key', and 'as' one of {', '.join(ENDS)}")
    transactions = control.context.transactions
    begin = partial(transactions.forget, key)
    if word != "forget":
        begin = partial(transactions.decide, key, HeuristicOutcome(word))
    error = await outcome_of(begin)
    if error is not None:
        raise error
    _log.info("transaction ended by command: key=%s as=%s", key, word)
    return {"key": key, "as": word}


async def _skip_damage(control: Control, request: Figures) -> Figures:
    """Skip damage in a queue; without `start` and `end`, only show it."""
    queues, get = control.context.queues, request.get
    topic, group, partition = get("topic"), get("group"), get("partition")
    start, end, agreed = get("start"), get("end"), None
    if not isinstance(topic, str) or not isinstance(group, str):
        raise AdminError("'topic' or 'group' is missing")
    if type(partition) is not int:
        raise AdminError("'partition': expected a whole number")
    if type(start) is int and type(end) is int:
        agreed = start, end
    elif start is not None or end is not None:
        raise AdminError("'start' and 'end': expected two whole numbers, or neither")
    if queues is None:
        raise AdminError("this broker has no queue groups")
    return await queues.skip_damage(topic, group, partition, agreed)


def _read_partitions(request: Figures) -> tuple[str, int, int | None]:
    """Return topic, first and last partition; None: the topic's last.

    Raises:
        AdminError: they are missing or invalid.
    """
    topic, start = request.get("topic"), request.get("start", 0)
    end = request.get("end")
    if not isinstance(topic, str) or not topic:
        raise AdminError("'topic' is missing")
    # A JSON true is an int in Python, hence the comparison of types.
    if type(start) is not int or not (end is None or type(end) is int):
        raise AdminError("'start' and 'end': expected whole numbers")
    if start < 0 or (end is not None and end < start):
        raise AdminError(f"expected 0 <= start <= end, got {start} and {end}")
    return topic, start, end


ORDERS: Final[Mapping[str, Order]] = MappingProxyType(
    {
        "status": _describing(describe_health),
        "logs": _describing(lambda status: {"logs": describe_logs(status)}),
        "directories": _describing(
            lambda status: {"directories": describe_directories(status)}
        ),
        "scrub": _describing(describe_scrub),
        "reload": _reload,
        "close_partitions": _close_partitions,
        "open_partitions": _open_partitions,
        "skip_damage": _skip_damage,
        "transactions": _transactions,
        "end_transaction": _end_transaction,
    }
)
"""Every order, by its `command`; `docs/operations.md` explains each."""


async def perform(
    control: Control, request: Figures, orders: Mapping[str, Order] = ORDERS
) -> Figures:
    """Carry out the order that a request names as its `command`.

    Raises:
        MetaqError: the order is refused; the text is one sentence.
    """
    command = str(request.get("command"))
    if command not in orders:
        raise AdminError(
            f"unknown command {command[:40]!r}: expected one of {', '.join(orders)}"
        )
    return await orders[command](control, request)
