"""Settles of a partition: gathered into one request, repeated while in doubt."""

import asyncio
import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from metaq.client.errors import OutcomeUnknownError, QueueGroupError
from metaq.client.queue.prefetch import HeldMessage
from metaq.client.queue.settling import (
    ENTRIES_MAX,
    GRACE_S,
    RECLAIM_BACKOFF,
    UNKNOWN_TO_SETTLES_S,
    PartitionSettler,
    Settling,
    UnknownGroup,
)
from metaq.config.settings import LimitsConfig
from metaq.errors import (
    ConnectionLostError,
    MetaqError,
    NotDefinedError,
    NotSentError,
    RemoteProtocolError,
    ServerError,
)
from metaq.model import BrokerId, Offset, TopicPartition
from metaq.protocol.commands import Result, Settle
from metaq.protocol.connection import Connection, Role, WireLimits
from metaq.protocol.queue_frames import (
    Settlement,
    SettleVerb,
    Word,
    decode_settlements,
    encode_words,
)
from metaq.testing.clock import ManualClock
from tests.rigs.waiting import until

PARTITION = TopicPartition("orders", BrokerId(3), 1)
LEASE_END_S = 100.0


def held(offset: int) -> HeldMessage:
    return HeldMessage(
        (), PARTITION, Offset(offset), 7, 1, 30.0, LEASE_END_S, since_s=70.0
    )


def entry(offset: int, verb: SettleVerb = SettleVerb.ACK, **more: Any) -> Settling:
    return Settling(held(offset), verb, since_s=80.0, **more)


class FakeConnection:
    """Keeps what is submitted until the test answers it."""

    def __init__(self) -> None:
        self.requests: list[tuple[Settle, Callable[[Any], None]]] = []
        self.faults: list[RemoteProtocolError] = []
        self._opaque = 0

    def next_opaque(self) -> int:
        self._opaque += 1
        return self._opaque

    def submit(
        self, frame: bytes, _opaque: int, on_reply: Callable[[Any], None], **_more: Any
    ) -> None:
        reader = Connection(Role.SERVER, WireLimits())
        reader.receive_data(frame)
        command = reader.next_event()
        assert isinstance(command, Settle)
        self.requests.append((command, on_reply))

    def close_for(self, error: RemoteProtocolError) -> None:
        self.faults.append(error)

    @property
    def entries(self) -> list[Settlement]:
        """Entries of the last request."""
        command, _ = self.requests[-1]
        return decode_settlements(command.payload, command.count)

    @property
    def offsets(self) -> list[int]:
        return [one.offset for one in self.entries]

    def answer(self, *words: Word) -> None:
        self.reply(Result(200, encode_words(words), self.requests[-1][0].opaque))

    def reply(self, reply: Result | MetaqError) -> None:
        self.requests[-1][1](reply)


class Rig:
    """A settler over a fake connection, and what became of its entries."""

    def __init__(self, *, is_ordered: bool = False) -> None:
        self.connection: FakeConnection | None = FakeConnection()
        self.ends: list[tuple[int, Word | MetaqError]] = []
        self.clock = ManualClock()
        context = SimpleNamespace(deadline_s=lambda: 90.0, clock=self.clock)
        parts: Any = SimpleNamespace(
            context=context,
            group="workers",
            worker="w-1",
            generation=3,
            is_ordered=is_ordered,
        )
        self.settler = PartitionSettler(
            parts,
            PARTITION,
            lambda: self.connection,  # type: ignore[arg-type,return-value]
            lambda entries, ends: self.ends.extend(
                zip((one.held.offset for one in entries), ends, strict=True)
            ),
            UnknownGroup(self.clock),
        )

    @property
    def wire(self) -> FakeConnection:
        assert self.connection is not None
        return self.connection

    def say(self, *entries: Settling) -> None:
        for one in entries:
            self.settler.add(one)
        self.settler.flush()


def test_what_gathers_while_one_request_is_in_flight_is_the_next_one() -> None:
    """One request at a time; the order of what is said is kept."""
    rig = Rig()
    rig.say(entry(0))
    rig.say(entry(10), entry(20))
    rig.say(entry(30, SettleVerb.NACK))
    assert len(rig.wire.requests) == 1
    rig.wire.answer(Word.OK)
    assert len(rig.wire.requests) == 2
    assert rig.wire.offsets == [10, 20, 30]
    rig.wire.answer(Word.OK, Word.DONE, Word.LOST)
    assert rig.ends == [(0, Word.OK), (10, Word.OK), (20, Word.DONE), (30, Word.LOST)]


@pytest.mark.parametrize("is_ordered", [False, True])
@pytest.mark.parametrize("verb", [SettleVerb.ACK, SettleVerb.NACK])
@pytest.mark.parametrize("is_awaited", [None, False, True])
def test_acks_that_no_one_waits_for_gather(
    *, is_awaited: bool | None, verb: SettleVerb, is_ordered: bool
) -> None:
    """One that is waited for, by a caller or by the next of a key, leaves at once."""

    async def scenario() -> None:
        rig = Rig(is_ordered=is_ordered)
        rig.settler.add(entry(0))
        future = None if is_awaited is None else asyncio.Future[None]()
        rig.settler.add(entry(10, verb, future=future, is_awaited=bool(is_awaited)))
        rig.settler.flush_soon()
        waits = not is_ordered and verb is SettleVerb.ACK and not is_awaited
        assert len(rig.wire.requests) == (0 if waits else 1)
        rig.settler.add(entry(20))
        rig.settler.flush_soon()
        if waits:
            await until(lambda: bool(rig.wire.requests))
            assert rig.wire.offsets == [0, 10, 20]
        else:
            rig.wire.answer(Word.OK, Word.OK)
            await until(lambda: len(rig.wire.requests) == 2)
            assert rig.wire.offsets == [20]

    asyncio.run(scenario())


def test_what_is_too_much_for_one_request_leaves_with_its_answer() -> None:
    """Callers wait for the rest, too."""
    rig = Rig()
    rig.say(*(entry(10 * number) for number in range(ENTRIES_MAX + 1)))
    rig.wire.answer(*[Word.OK] * ENTRIES_MAX)
    assert rig.wire.offsets == [10 * ENTRIES_MAX]


def test_a_request_says_who_settles_what() -> None:
    """Worker, group, its generation, partition, delivery, verb and text."""
    rig = Rig()
    rig.say(entry(0, SettleVerb.REJECT, text="broken"))
    command, _ = rig.wire.requests[-1]
    assert (command.topic, command.group, command.partition, command.worker) == (
        "orders",
        "workers",
        1,
        "w-1",
    )
    assert command.generation == 3
    (said,) = rig.wire.entries
    assert (said.delivery, said.verb, said.text) == (7, SettleVerb.REJECT, "broken")


def test_a_request_without_an_answer_is_sent_again_before_what_is_newer() -> None:
    """Over the next connection; the entry is in doubt from then on."""

    async def scenario() -> None:
        rig = Rig()
        first = entry(0)
        rig.say(first)
        rig.say(entry(10))
        lost = rig.wire
        rig.connection = None
        lost.reply(ConnectionLostError("lost"))
        assert first.is_in_doubt
        assert rig.ends == []
        rig.connection = FakeConnection()
        rig.settler.flush()
        assert rig.wire.offsets == [0, 10]
        rig.wire.answer(Word.DONE, Word.OK)
        assert rig.ends == [(0, Word.DONE), (10, Word.OK)]

    asyncio.run(scenario())


def test_a_refusal_that_passes_is_tried_again_by_itself() -> None:
    """A broker that starts, say; nothing was done, so nothing is in doubt."""

    async def scenario() -> None:
        rig = Rig()
        one = entry(0)
        rig.say(one)
        rig.wire.reply(Result(503, b"starting", 1))
        await until(lambda: len(rig.wire.requests) == 2)
        assert not one.is_in_doubt
        rig.wire.answer(Word.OK)
        assert rig.ends == [(0, Word.OK)]

    asyncio.run(scenario())


def test_what_a_leader_leaves_in_doubt_is_asked_of_the_next_one() -> None:
    """Which says `done` of what it has."""

    async def scenario() -> None:
        rig = Rig()
        one = entry(0)
        rig.say(one)
        rig.wire.reply(Result(500, b"its term is over [in-doubt]", 1))
        await until(lambda: len(rig.wire.requests) == 2)
        assert one.is_in_doubt
        rig.wire.answer(Word.DONE)
        assert rig.ends == [(0, Word.DONE)]

    asyncio.run(scenario())


def test_a_refusal_is_the_end_of_all_that_went_together() -> None:
    """The error is that of each of them; what comes later is said."""
    rig = Rig()
    rig.say(entry(0), entry(10))
    rig.say(entry(20))
    rig.wire.reply(Result(500, b"no such queue", 1))
    assert [offset for offset, _ in rig.ends] == [0, 10]
    assert {str(error) for _, error in rig.ends} == {"no such queue"}
    assert rig.wire.offsets == [20]


def test_an_answer_that_makes_no_sense_closes_the_connection() -> None:
    """Its entries are in doubt, and said again."""

    async def scenario() -> None:
        rig = Rig()
        one = entry(0)
        rig.say(one)
        rig.wire.answer(Word.OK, Word.OK)
        assert [type(each) for each in rig.wire.faults] == [RemoteProtocolError]
        assert one.is_in_doubt
        assert rig.ends == []

    asyncio.run(scenario())


def test_a_group_that_its_broker_does_not_know_any_more_ends_its_settles() -> None:
    """After a pause in which a new leader may hear of it; an answer begins it again."""

    async def scenario() -> None:
        rig, unknown = Rig(), NotDefinedError("queue group 'workers' is not defined")
        for wait_s in (0.0, UNKNOWN_TO_SETTLES_S - 0.1):
            rig.clock.advance_s(wait_s)
            rig.say(entry(0))
            rig.wire.reply(unknown)
            assert rig.ends == []
        rig.settler.flush()
        rig.wire.answer(Word.OK, Word.OK)
        rig.ends.clear()
        rig.clock.advance_s(UNKNOWN_TO_SETTLES_S)
        rig.say(entry(10))
        rig.wire.reply(unknown)
        assert rig.ends == []
        rig.clock.advance_s(UNKNOWN_TO_SETTLES_S)
        rig.settler.flush()
        rig.wire.reply(unknown)
        ((offset, error),) = rig.ends
        assert (offset, type(error)) == (10, QueueGroupError)
        assert "broker 3 no longer has queue group 'workers'" in str(error)

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("is_in_doubt", "kind"), [(True, OutcomeUnknownError), (False, NotSentError)]
)
def test_an_entry_ends_some_seconds_after_the_lease(
    is_in_doubt: bool, kind: type[MetaqError]
) -> None:
    """With an error that says whether it may have been done."""
    rig = Rig()
    rig.connection = None
    rig.say(entry(0, is_in_doubt=is_in_doubt))
    rig.settler.expire(LEASE_END_S + GRACE_S - 0.1)
    assert rig.ends == []
    rig.settler.expire(LEASE_END_S + GRACE_S)
    ((_offset, error),) = rig.ends
    assert isinstance(error, kind)
    assert "orders/3-1: message at offset 0: its ack" in str(error)
    rig.settler.expire(math.inf)
    assert len(rig.ends) == 1


@pytest.mark.parametrize("is_error", [False, True])
def test_what_is_given_up_in_flight_is_in_doubt_and_its_answer_is_late(
    *, is_error: bool
) -> None:
    """A later settle is not taken for it, and it is not said again."""
    rig = Rig()
    rig.say(entry(0))
    rig.say(entry(10))
    late = rig.wire.requests[-1]
    rig.settler.give_up()
    assert [type(error) for _, error in rig.ends] == [OutcomeUnknownError, NotSentError]
    rig.say(entry(20))
    answer = Result(200, encode_words([Word.OK]), late[0].opaque)
    late[1](ServerError("refused") if is_error else answer)
    assert len(rig.ends) == 2
    rig.wire.answer(Word.OK)
    assert rig.ends[2] == (20, Word.OK)


def test_a_worker_tries_again_twice_within_the_reclaim_time_of_a_broker() -> None:
    """However long it has failed, and whatever chance says."""
    longest_s = RECLAIM_BACKOFF.delay_s(1_000, lambda: 0.999)
    assert 2 * longest_s < LimitsConfig().queue_reclaim_ms / 1000
