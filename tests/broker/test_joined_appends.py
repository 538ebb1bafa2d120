"""Appends to several partitions by one transaction of the broker: all or none."""

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from metaq.broker.joined_appends import OPEN_MAX, JoinedAppends, JoinedRecord
from metaq.broker.queue_log import QUEUES
from metaq.errors import MetaqError, TransactionError
from metaq.model import LogId
from tests.broker.queue_worker import stored
from tests.rigs.broker import running_broker
from tests.rigs.waiting import until

RECORDS = (
    JoinedRecord(LogId("test", 0), b"letter"),
    JoinedRecord(QUEUES, b"x"),
)


def test_all_are_stored_when_it_is_reported(tmp_path: Path) -> None:
    """In the topic's partition, and in one of the broker's own; also after a start."""

    async def main() -> None:
        async with running_broker(tmp_path) as broker:
            outcomes: list[MetaqError | None] = []
            JoinedAppends(broker.context).append(RECORDS, outcomes.append)
            await until(lambda: outcomes)
            assert outcomes == [None]
            (letter,) = await stored(broker, "test")
            assert letter.payload == b"letter"
        async with running_broker(tmp_path) as broker:
            own = broker.context.topics.find_internal(QUEUES)
            assert own is not None
            assert own.high_watermark > 0
            assert len(await stored(broker, "test")) == 1

    asyncio.run(main())


def test_more_than_the_bound_are_refused(tmp_path: Path) -> None:
    """To be tried again; nothing of them is stored."""

    async def main() -> None:
        async with running_broker(tmp_path) as broker:
            joined, outcomes = JoinedAppends(broker.context), list[MetaqError | None]()
            for _ in range(OPEN_MAX + 1):
                joined.append(RECORDS, outcomes.append)
            assert [type(each) for each in outcomes] == [TransactionError]
            await until(lambda: len(outcomes) == OPEN_MAX + 1)
            assert outcomes.count(None) == OPEN_MAX
            assert len(await stored(broker, "test")) == OPEN_MAX
            joined.append(RECORDS, outcomes.append)
            await until(lambda: len(outcomes) == OPEN_MAX + 2)
            assert outcomes[-1] is None

    asyncio.run(main())


class _Deciding:
    """Transactions whose commit is decided, or not, and whose partitions fail."""

    def __init__(self, *, is_decided: bool) -> None:
        self.is_decided = is_decided
        self.tx = SimpleNamespace(holds=[])

    def begin(self, *_args: object) -> None:
        pass

    def find_for_put(self, *_args: object) -> SimpleNamespace:
        return self.tx

    def put(self, *_args: object) -> None:
        pass

    def commit(self, _key: str, _owner: object, on_done: Any, **_options: bool) -> None:
        for hold in self.tx.holds:
            hold.on_ended(is_committed=self.is_decided)
        on_done(TransactionError("not in every partition yet"))


@pytest.mark.parametrize("is_decided", [True, False])
def test_what_is_decided_is_not_to_be_appended_again(is_decided: bool) -> None:
    """A partition that fails after that gets its record later, from the journal."""
    outcomes: list[MetaqError | None] = []
    context: Any = SimpleNamespace(
        transactions=_Deciding(is_decided=is_decided),
        ids=SimpleNamespace(reserve=lambda _count: 1),
    )
    JoinedAppends(context).append(RECORDS, outcomes.append)
    assert [each is None for each in outcomes] == [is_decided]
