"""Commands to the brokers of an XA transaction: a failure does not stop others."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from metaq.client import TransactionInDoubtError, TransactionRolledBackError
from metaq.client.produce.transaction_branch import BranchParts
from metaq.client.produce.xa_commands import COMMIT, XaCommands
from metaq.errors import (
    ConnectionLostError,
    MetaqError,
    NoBrokerError,
    RemoteProtocolError,
)
from metaq.model import BrokerId, XaTransactionId
from metaq.protocol.commands import Result, TransactionType

XID = XaTransactionId(1, b"global", b"", "q")
BROKERS = [BrokerId(0), BrokerId(1)]


class Parts:
    """Brokers that answer 0, but for some."""

    send: Any = BranchParts.send
    vote: Any = BranchParts.vote

    def __init__(self, errors: dict[int, MetaqError]) -> None:
        self.errors = errors
        self.kinds: list[tuple[int, TransactionType]] = []
        self.starts = SimpleNamespace(known=lambda _: None)

    async def connect(self, broker_id: int, *, deadline_s: float) -> Any:
        if broker_id in self.errors:
            raise self.errors[broker_id]
        return broker_id

    async def call(
        self, broker_id: int, _xid: Any, kind: TransactionType, **_options: Any
    ) -> Result:
        self.kinds.append((broker_id, kind))
        return Result(200, b"0", 1)


def made(errors: dict[int, MetaqError]) -> tuple[XaCommands, Parts]:
    parts: Any = Parts(errors)
    context: Any = None
    return XaCommands(context, parts), parts


def test_every_broker_is_asked_though_one_is_away() -> None:
    """The error names it; the votes of the others are there."""
    error = NoBrokerError("away")
    commands, parts = made({0: error})
    votes = asyncio.run(commands.prepare(XID, BROKERS, 9.0))
    assert votes == {0: error, 1: True}
    with pytest.raises(TransactionInDoubtError, match=r"commit.* to broker 0: .*away"):
        asyncio.run(commands.end(XID, COMMIT, BROKERS, 9.0))
    assert asyncio.run(commands.drop(XID, BROKERS, 9.0)) == [0]
    assert [broker_id for broker_id, _ in parts.kinds] == [1, 1, 1]


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (NoBrokerError("away"), TransactionRolledBackError),
        (ConnectionLostError("lost"), TransactionInDoubtError),
    ],
)
def test_a_commit_in_one_phase_that_never_left_is_none(
    error: MetaqError, kind: type[MetaqError]
) -> None:
    """One that may have arrived may be carried out."""
    commands, _ = made({0: error})
    with pytest.raises(kind):
        asyncio.run(commands.commit_one_phase(XID, BROKERS[:1], 9.0))


def test_a_list_that_is_no_list_ends_the_connection() -> None:
    """Answers to later requests on it could be anything; the error names the broker."""
    ended: list[RemoteProtocolError] = []

    class Broken(Parts):
        async def connect(self, broker_id: int, *, deadline_s: float) -> Any:
            return SimpleNamespace(close_for=ended.append)

        async def call(
            self, broker_id: int, _xid: Any, kind: TransactionType, **_options: Any
        ) -> Result:
            return Result(200, b"TX:session:1", 1)

    parts: Any = Broken({})
    context: Any = None
    commands = XaCommands(context, parts)
    found = asyncio.run(commands.recover_each("q", BROKERS[:1], 9.0))
    assert found == {0: ended[0]}
    assert "broker 0" in str(ended[0])
