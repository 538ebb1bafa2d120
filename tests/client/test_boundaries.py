"""Message boundaries at an offset, or n messages before it, with bounded work."""

import asyncio
import itertools
import random
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any, TypeVar

import pytest

from metaq.client import AsyncClient
from metaq.client.cluster.boundaries import WINDOW_BYTES, offset_back, require_boundary
from metaq.client.cluster.catalog import read_cluster
from metaq.client.cluster.context import ClientContext
from metaq.errors import ClientError, CorruptRecordError, NoRecordError
from metaq.model import MessageId, Offset
from metaq.protocol.commands import Get, Value
from metaq.record.layout import HEADER_BYTES, encode_record
from tests.brokers import AnyBroker, StartBroker
from tests.client.worlds import partition, parts_of

ONE_BROKER = {"java": "damage, a log whose start moves, no counts"}
T = TypeVar("T")
PATIENCE_S = 60.0
FIRST = partition()
MIB = 1024 * 1024


class CountingConnection:
    """A connection that counts what is asked over it, and what comes."""

    def __init__(self, inner: Any, counts: "Counts") -> None:
        self._inner, self._counts = inner, counts

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    async def call(self, command: Any, **named: Any) -> Any:
        reply = await self._inner.call(command, **named)
        self._counts.request_count += 1
        self._counts.get_count += isinstance(command, Get)
        if isinstance(reply, Value):
            self._counts.size_bytes += len(reply.payload)
        return reply


class Counts:
    """Connections of a client that are counted."""

    def __init__(self, pool: Any) -> None:
        self._pool = pool
        self.request_count = self.get_count = self.size_bytes = 0

    async def get(self, *args: Any, **named: Any) -> CountingConnection:
        return CountingConnection(await self._pool.get(*args, **named), self)


def asked(
    broker: AnyBroker, work: Callable[[ClientContext, float], Awaitable[T]]
) -> tuple[T, Counts]:
    """Return what a question brings, and the counts of it."""

    async def run() -> tuple[T, Counts]:
        async with AsyncClient(**broker.client_options) as client:
            context = parts_of(client)
            deadline_s = context.clock.monotonic_s() + PATIENCE_S
            await context.metadata.wait_newer(0, deadline_s=deadline_s)
            await read_cluster(context, {"test"}, deadline_s=deadline_s)
            counts: Any = Counts(context.pool)
            counted = replace(context, pool=counts)
            return await work(counted, deadline_s), counts

    return asyncio.run(run())


def back(
    broker: AnyBroker, *questions: tuple[int, int], number: int = 0
) -> tuple[list[int], Counts]:
    """Return the offsets that are so many messages before others."""

    async def ask(context: ClientContext, deadline_s: float) -> list[int]:
        return [
            await offset_back(
                context, partition(number), Offset(at), count, deadline_s=deadline_s
            )
            for at, count in questions
        ]

    return asked(broker, ask)


def random_payload(rng: random.Random) -> bytes:
    """Return a payload of any size; some hold records, some look like empty ones."""
    kind = rng.random()
    if kind < 0.1:
        return b""
    if kind < 0.2:
        size = rng.randrange(1, 20_000)
        inner = [rng.randbytes(rng.randrange(50)) for _ in range(size // 100)]
        records = (encode_record(one, id=MessageId(7), flag=0) for one in inner)
        return rng.randbytes(rng.randrange(3)) + b"".join(records)
    if kind < 0.3:
        return bytes(rng.randrange(1, 300)) + rng.randbytes(rng.randrange(20))
    if kind < 0.32:
        return rng.randbytes(rng.randrange(MIB - 30))
    return rng.randbytes(int(rng.expovariate(1 / 2000)))


@pytest.mark.slow
def test_it_is_where_the_list_of_all_messages_says(
    start_broker: StartBroker, rng: random.Random
) -> None:
    """From any message, over any number; segments end anywhere."""
    settings = {"maxSegmentSize": "1000000"}
    broker: Any = start_broker({"test": 1}, settings=settings)
    offsets: list[Offset] = []
    sizes: list[int] = []
    while sum(sizes) < 4 * WINDOW_BYTES:
        data = [random_payload(rng) for _ in range(rng.randrange(1, 30))]
        sizes += map(len, data)
        offsets += broker.put(*data)
        if not broker.has_extensions and rng.random() < 0.3:
            broker.inner.roll()
    end = offset_after(broker)
    offsets = [*sorted(offsets), end]
    chosen = [(rng.randrange(len(offsets)), rng.randrange(400)) for _ in range(20)]
    questions = [(offsets[at], count) for at, count in chosen]
    found, _counts = back(broker, *questions)
    assert found == [offsets[max(0, at - count)] for at, count in chosen]


def nearest(broker: AnyBroker, *offsets: int) -> list[list[int]]:
    """Return the boundaries that errors name beside offsets; of a boundary, itself."""

    async def look(context: ClientContext, deadline_s: float, offset: int) -> list[int]:
        try:
            await require_boundary(
                context, FIRST, Offset(offset), deadline_s=deadline_s
            )
        except ClientError as error:
            start = f"test/0-0: {offset} is not a message boundary; nearest: "
            names = str(error).removeprefix(start)
            if names == str(error):
                raise
            return [int(one) for one in names.split(", ") if one != "not known"]
        return [offset]

    async def ask(context: ClientContext, deadline_s: float) -> list[list[int]]:
        return [await look(context, deadline_s, offset) for offset in offsets]

    return asked(broker, ask)[0]


@pytest.mark.slow
def test_an_offset_is_a_boundary_or_its_neighbours_are_named(
    start_broker: StartBroker, rng: random.Random
) -> None:
    """For any offset within, between messages of any size."""
    broker = start_broker({"test": 1}, settings={"maxSegmentSize": "1000000"})
    data: list[bytes] = []
    while sum(map(len, data)) < 2 * WINDOW_BYTES:
        data.append(random_payload(rng))
    broker.put(*data)
    sizes = [len(one) + HEADER_BYTES for one in data]
    bounds = [0, *itertools.accumulate(sizes)]
    questions, answers = [], []
    for _ in range(50):
        at = rng.randrange(1, len(bounds))
        inside = rng.randrange(bounds[at - 1] + 1, bounds[at])
        questions += [bounds[at], inside]
        answers += [[bounds[at]], bounds[at - 1 : at + 1]]
    assert nearest(broker, *questions) == answers


@pytest.mark.slow
def test_an_offset_outside_the_log_is_refused_with_its_ends(
    start_broker: StartBroker,
) -> None:
    """The ends themselves are boundaries."""
    broker = start_broker({"test": 1})
    assert nearest(broker, 0) == [[0]]
    with pytest.raises(ClientError, match="expected an offset from 0 to 0, got 1"):
        nearest(broker, 1)
    broker.put(b"a")
    assert nearest(broker, 0, 21, 5) == [[0], [21], [0, 21]]


def offset_after(broker: AnyBroker) -> Offset:
    """Return the end of a broker's log."""
    (found,), _counts = back(broker, (2**62, 0))
    return Offset(found)


@pytest.mark.slow
def test_the_work_does_not_grow_with_the_log(start_broker: StartBroker) -> None:
    """Ten back of a log of 40 MB: a window at most, and a few questions."""
    broker = start_broker({"test": 1})
    data = [b"%06d" % number + bytes(9_974) for number in range(4_000)]
    offsets = broker.put(*data)
    end = offset_after(broker)
    assert end == 40_000_000
    (ten, most), counts = back(broker, (end, 10), (end, 2_000))
    assert (ten, most) == (sorted(offsets)[-10], sorted(offsets)[-2_000])
    few = back(broker, (end, 10))[1]
    assert few.size_bytes <= WINDOW_BYTES
    assert few.request_count <= 20
    # Without counts the messages themselves are read, and as much again.
    bound = WINDOW_BYTES if broker.has_extensions else 40 * MIB + WINDOW_BYTES
    assert counts.size_bytes <= few.size_bytes + bound


@pytest.mark.slow
def test_offsets_outside_the_log_are_taken_for_its_ends(
    start_broker: StartBroker,
) -> None:
    """As of all questions about a range; without a log everything begins at 0."""
    broker = start_broker({"test": 2})
    offsets = broker.put(b"a", b"b", b"c")
    assert back(broker, (10**9, 1), (10**9, 0), (0, 5), (21, 0))[0] == [42, 63, 0, 21]
    assert sorted(offsets) == [0, 21, 42]
    assert back(broker, (0, 1), (77, 3), number=1)[0] == [0, 0]


def test_an_offset_within_a_message_is_refused(start_broker: StartBroker) -> None:
    """MetaQ 1.4's brokers do not know it; no records lead there."""
    broker = start_broker({"test": 1})
    broker.put(b"a", b"b", b"c")
    wanted = NoRecordError if broker.has_extensions else CorruptRecordError
    with pytest.raises(wanted, match="22"):
        back(broker, (22, 1))


# -- MetaQ 1.4 -------------------------------------------------------------------------


@pytest.fixture
def java(start_metaq_1_4: StartBroker) -> Any:
    return start_metaq_1_4()


@pytest.mark.slow
def test_an_offset_after_damage_is_a_boundary(java: Any) -> None:
    """So is the place at which damage begins: a group goes on there, or after it."""
    offsets = java.put(*(b"%02d" % number + bytes(100) for number in range(10)))
    java.inner.corrupt(offsets[5], length=50)
    java.inner.corrupt(offsets[7])
    good = offsets[5:9]
    assert nearest(java, *good) == [[at] for at in good]
    beside = [[offsets[8]], [offsets[8], offsets[9]]]
    assert nearest(java, offsets[7] + 1, offsets[8] + 1) == beside


@pytest.mark.slow
def test_a_log_whose_start_was_deleted_ends_there(java: Any) -> None:
    """The first message that there still is; small answers of a get do not matter."""
    java.put(b"a", b"b")
    java.inner.roll()
    kept = java.put(b"c", b"d", b"e")
    java.inner.trim()
    java.inner.metaq.transfer_bytes_max = 30
    end = java.inner.log_end()
    found, _counts = back(java, (end, 1), (end, 3), (end, 4), (kept[1], 9), (0, 2))
    assert found == [kept[2], kept[0], kept[0], kept[0], kept[0]]


@pytest.mark.slow
def test_messages_larger_than_a_window_are_found(java: Any, rng: random.Random) -> None:
    """A message may be of any size, and hold what ends like records."""
    inner = encode_record(b"inner", id=MessageId(7), flag=0)
    sizes = [10, 5 * MIB, 0, 3 * MIB, WINDOW_BYTES, 7]
    large = [rng.randbytes(size) for size in sizes]
    offsets = java.put(*large, bytes(MIB - 99) + inner)
    end = java.inner.log_end()
    found, _counts = back(java, *((end, count) for count in range(1, 8)))
    assert found == list(reversed(offsets))


@pytest.mark.slow
def test_what_looks_like_records_within_a_message_is_none(java: Any) -> None:
    """A message that holds a whole log of small messages counts as one."""
    inner = b"".join(
        encode_record(b"%06d" % number, id=MessageId(number), flag=0)
        for number in range(30_000)
    )
    offsets = java.put(*(bytes(5_000) for _ in range(400)), inner, b"after")
    end = java.inner.log_end()
    found, _counts = back(java, (end, 1), (end, 2), (end, 3), (end, 300))
    assert found == [offsets[-1], offsets[-2], offsets[-3], offsets[-300]]


@pytest.mark.slow
@pytest.mark.parametrize("length", [None, 40])
def test_damage_after_the_answer_is_an_error_that_names_it(
    java: Any, length: int | None
) -> None:
    """It cannot be counted, and is not skipped; earlier damage is no matter."""
    data = [b"%06d" % number + bytes(9_974) for number in range(1000)]
    offsets = java.put(*data)
    end = java.inner.log_end()
    java.inner.corrupt(offsets[500], length=length)
    found, _counts = back(java, (end, 499), (offsets[500], 10), (offsets[500], 500))
    assert found == [offsets[501], offsets[490], 0]
    with pytest.raises(CorruptRecordError, match="damaged record at offset") as caught:
        back(java, (end, 500))
    assert caught.value.offset == offsets[500]
    assert caught.value.next_good_offset == offsets[501]


def test_bytes_that_do_not_come_are_an_error(java: Any) -> None:
    """A gap of a segment: MetaQ answers as at the end of the log."""
    offsets = java.put(*(b"%d" % number for number in range(10)))
    java.inner.lose(offsets[4], offsets[6])
    end = java.inner.log_end()
    with pytest.raises(CorruptRecordError, match=f"offset {offsets[4]}: no data"):
        back(java, (end, 2))


def test_a_log_start_that_moves_meanwhile_ends_the_search(java: Any) -> None:
    """Retention may delete what is being read."""
    java.put(*(bytes(1000) for _ in range(3000)))
    java.inner.roll()
    kept = java.put(b"x", b"y")
    end = java.inner.log_end()

    async def ask(context: ClientContext, deadline_s: float) -> int:
        inner, turns = context.pool.get, itertools.count()

        async def get(*args: Any, **named: Any) -> Any:
            if next(turns) == 2:
                java.inner.trim()
            return await inner(*args, **named)

        context.pool.get = get  # type: ignore[method-assign]  # a counted pool
        return await offset_back(context, FIRST, end, 2000, deadline_s=deadline_s)

    assert asked(java, ask)[0] == kept[0]
