"""The hot path does what the general path does, only faster."""

import asyncio
import inspect
import itertools
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from zlib import crc32

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from metaq.broker.hot_puts import ANY_READS_MAX, TAKEN_MAX, HotPuts, read_i32
from metaq.model import LogId
from metaq.testing.clock import ManualClock
from metaq.txn.records import decode_record
from tests.rigs.broker import Peer, running_broker, take_nothing
from tests.rigs.inside import hot_puts_of
from tests.rigs.waiting import until

NOW_MS = 1_700_000_000_000


def put(
    topic: str = "test",
    partition: object = 0,
    payload: bytes = b"hello",
    *,
    flag: object = 0,
    checksum: object = None,
    opaque: object = 7,
    length: object = None,
) -> bytes:
    token = crc32(payload) & 0x7FFFFFFF if checksum is None else checksum
    size = len(payload) if length is None else length
    head = f"put {topic} {partition} {size} {flag} {token} {opaque}\r\n"
    return head.encode() + payload


ODD: dict[str, st.SearchStrategy[object]] = {
    "topic": st.sampled_from(["wild-é", "nosuch", "../x"]),
    "partition": st.sampled_from([2, -1, -2, "00", "+1"]),
    "payload": st.sampled_from([b"", b"\r\n\r\n", b"put test 0", bytes(70_000)]),
    "flag": st.sampled_from([1, -1, "+7", "007"]),
    "checksum": st.sampled_from([-1, 0, 12345, "007", "-2"]),
    "length": st.just("05"),
    "opaque": st.sampled_from(["007", "+5", "-0", -(2**31), "0000000000000000001"]),
}
"""Unusual fields of a put that is answered all the same, one at a time."""

ODD_PUTS = st.sampled_from(sorted(ODD)).flatmap(
    lambda field: st.builds(put, **{field: ODD[field]})
)
BROKEN = st.one_of(
    st.builds(put, partition=st.sampled_from(["x", "4294967296"])),
    st.builds(put, flag=st.sampled_from(["2147483648", "f", ""])),
    st.builds(put, checksum=st.sampled_from(["abc", ""])),
    st.builds(put, length=st.sampled_from([-1, 3, 100])),
    st.builds(put, opaque=st.sampled_from(["2147483648", "x", "1_0", "-", "٣"])),
    st.sampled_from([b"putt test 0 1 0 0 1\r\n", b"put\r\n", b"put ", b"\r\n"]),
)
"""Bytes that end the connection, or leave a frame open; at most one, at the end."""

ORDINARY = st.builds(
    put,
    topic=st.sampled_from(["test", "meta-test"]),
    partition=st.sampled_from([0, 1]),
    payload=st.binary(max_size=40),
    opaque=st.integers(-(2**31), 2**31 - 1),
)
EVERY_FORM = st.builds(
    put,
    topic=st.sampled_from(["test", "meta-test"]),
    partition=st.sampled_from([-1, 0, 1]),
    payload=st.binary(max_size=3),
    flag=st.sampled_from([0, 1, -7]),
    checksum=st.sampled_from([None, -1]),
) | st.sampled_from([b"put test 0 3 0 12\r\nold", b"put meta-test -1 3 5 -7\r\nold"])
"""Puts that are stored and have an unusual form, mixed."""
OTHERS = st.sampled_from(
    [
        b"put test 0 3 0 12\r\nold",
        b"put test 0 4 0 125638 TX:s:1 9\r\ntx-3",
        b"version 3\r\n",
        # Of the first put: others may be stored, or not yet.
        b"get test g 0 0 23 4\r\n",
        b"offset test g 0 0 5\r\n",
    ]
)
ALIKE_MIN = 32
"""Fewest puts of a long run of puts that are alike."""

ALIKE = st.builds(
    lambda opaques, payload, form: b"".join(
        put(payload=payload, opaque=o, **form) for o in opaques
    ),
    st.lists(
        st.integers(-(2**31), 2**31 - 1), min_size=ALIKE_MIN, max_size=2 * ALIKE_MIN
    ),
    st.sampled_from([b"", b"hello", b"\r\nput test 0 5 0 907060870 7\r\nhello"]),
    st.sampled_from([{}, {"checksum": -1}, {"partition": -1}, {"flag": 3}]),
)
"""Many puts that differ in their opaques alone."""

FRAMES = st.builds(
    lambda frames, last: [*frames, *last],
    st.lists(ORDINARY | EVERY_FORM | ODD_PUTS | OTHERS | ALIKE, max_size=30),
    st.lists(BROKEN, max_size=1),
)


async def run(data: Path, pieces: list[bytes], *, is_hot: bool) -> list[object]:
    """Return everything that a broker answered and stored."""
    ((answer, is_closed),), rest = await run_all(data, [pieces], is_hot=is_hot)
    return [answer, is_closed, *rest]


async def run_all(
    data: Path, talks: list[list[bytes]], *, is_hot: bool
) -> tuple[list[tuple[bytes, bool]], list[object]]:
    """Return what a broker answered on each connection, and what it stored in all.

    The connections come one after the other, each with its pieces. Of each it is told
    whether the broker closed it as well.
    """
    clock = ManualClock(wall_ms=NOW_MS)
    async with running_broker(data, clock=clock) as broker:
        replies = []
        for pieces in talks:
            async with Peer(broker) as peer:
                if not is_hot:
                    take_nothing(peer.session)
                answers = []
                for piece in pieces:
                    answers.append(await peer.ask(piece))
                    if peer.is_closed():
                        break
                answer = b"".join(answers).replace(b":%d'" % broker.port, b":PORT'")
                replies.append((answer, peer.is_closed()))
        found: list[object] = [
            sorted(
                (log.log_id, log.high_watermark) for log in broker.context.topics.logs()
            )
        ]
        counters = broker.context.counters
        found += [counters.cmd_put, counters.put_failed]
        found += [
            broker.context.realtime.describe(name) for name in ("put", "put_failed")
        ]
    for path in sorted({*data.glob("*/*.meta"), *data.glob("*/producers")}):
        found += [path.name, path.read_bytes()]
    return replies, found


def cut(raw: bytes, cuts: list[int]) -> list[bytes]:
    places = sorted({place % (len(raw) + 1) for place in cuts} | {0, len(raw)})
    return [raw[a:b] for a, b in itertools.pairwise(places)]


@pytest.mark.slow
@settings(max_examples=25)
@given(frames=FRAMES, cuts=st.lists(st.integers(0, 5000), max_size=4))
def test_hot_and_general_path_answer_and_store_the_same(
    frames: list[bytes], cuts: list[int]
) -> None:
    """Any input, cut anywhere: replies, counters and every byte on disk are equal."""
    # First puts make the logs, so that the hot path has something to do.
    first = [put(t, p, opaque=p) for t in ("test", "meta-test") for p in (0, 1)]
    pieces = first + cut(b"".join(frames), cuts)
    with TemporaryDirectory() as directory:
        hot = asyncio.run(run(Path(directory) / "hot", pieces, is_hot=True))
        general = asyncio.run(run(Path(directory) / "general", pieces, is_hot=False))
    # Puts to several logs may be answered in another order, those of one log may not.
    assert sorted(_frames(hot[0])) == sorted(_frames(general[0]))
    assert hot[1:] == general[1:]


@pytest.mark.slow
@settings(max_examples=25)
@given(
    frames=st.lists(ORDINARY | EVERY_FORM | ODD_PUTS | OTHERS, max_size=30),
    last=st.lists(BROKEN, max_size=1),
)
def test_puts_received_alone_are_answered_and_stored_the_same(
    frames: list[bytes], last: list[bytes]
) -> None:
    """One frame in a read, as clients send that wait for each reply."""
    first = [put(t, p, opaque=p) for t in ("test", "meta-test") for p in (0, 1)]
    with TemporaryDirectory() as directory:
        hot, general = (
            asyncio.run(run(Path(directory) / name, first + frames + last, is_hot=hot))
            for name, hot in (("hot", True), ("general", False))
        )
    assert hot == general


ODD_ONES = [
    put(opaque="2147483648"),
    put(opaque="9" * 19),
    put(opaque="1_0"),
    put(opaque="٣"),
    put(opaque="-"),
    put(opaque="-0"),
    put(checksum=1),
    put(checksum=-1),
    put(checksum="0907060870"),
    put(checksum="TX:a:1"),
    put(partition=-1),
    put(partition="00"),
    put(partition=2),
    put(flag="2147483648"),
    put(flag="+7"),
    put(flag=""),
    put(length=-1),
    put(length="05"),
    put(topic=""),
    put(topic="nosuch"),
    b"\r\n",
    b" 5 0 907060870 7\r\nhello",
    b"  5 0 907060870 7\r\nhello",
    b"put  0 5 0 907060870 7\r\nhello",
    b"put test 0 5 0 907060870 7 \r\nhello",
    b"put test 0 5 0 907060870 7\nhello",
]


@pytest.mark.slow
@pytest.mark.parametrize("is_alone", [False, True])
def test_each_oddity_is_treated_the_same(is_alone: bool, tmp_path: Path) -> None:
    """One odd frame between ordinary ones, or alone: same replies, bytes and fate."""
    talks = [
        [put(), put(), frame] if is_alone else [put(), put() + frame + put()]
        for frame in ODD_ONES
    ]
    hot, general = (
        asyncio.run(run_all(tmp_path / name, talks, is_hot=name == "hot"))
        for name in ("hot", "general")
    )
    for frame, one, other in zip(ODD_ONES, hot[0], general[0], strict=True):
        assert sorted(_frames(one[0])) == sorted(_frames(other[0])), frame
        assert one[1] == other[1], frame
    assert hot[1] == general[1]


@pytest.mark.slow
@pytest.mark.parametrize(
    "frame",
    [
        b"",
        put(opaque="2147483648"),
        put(opaque="-2147483649"),
        put(opaque=-(2**31)),
        put(opaque="-0"),
        put(opaque="007"),
        put(opaque="+7"),
        put(opaque="1" * 11),
        put(opaque="٣"),
        put(checksum=1),
        put(checksum=-1),
        put(checksum="0907060870"),
        put(checksum="907060870 "),
        put(payload=b"hell\n"),
        put(payload=b"longer"),
        put(payload=b"short", length=4),
        put(partition=1),
        put(flag=1),
        put(topic="meta-test"),
        b"version 3\r\n",
        b"quit\r\n",
        b"put test 0 5 0 907060870 7\nhello",
    ],
)
def test_an_oddity_in_a_long_run_is_treated_the_same(
    frame: bytes, tmp_path: Path
) -> None:
    """Many puts alike, an odd frame between such, and a frame that is cut in two."""
    alike = b"".join(put(opaque=o) for o in range(ALIKE_MIN))
    pieces = [
        put(),
        put(partition=1),
        put(topic="meta-test"),
        alike,
        alike + frame + alike,
    ]
    pieces += [alike + put()[:-2], put()[-2:] + alike]
    hot = asyncio.run(run(tmp_path / "hot", pieces, is_hot=True))
    general = asyncio.run(run(tmp_path / "general", pieces, is_hot=False))
    assert sorted(_frames(hot[0])) == sorted(_frames(general[0]))
    assert hot[1:] == general[1:]


def test_a_long_read_is_taken_in_bounded_steps(tmp_path: Path) -> None:
    """Each is one append, and the session hears that there may be more."""

    async def scenario() -> None:
        async with running_broker(tmp_path / "data") as broker, Peer(broker) as peer:
            await peer.ask(put())
            log = broker.context.topics.find_log("test", 0)
            assert log is not None
            hot, before = hot_puts_of(peer.session), log.statistics().append_count
            data = b"".join(put(payload=b"x" * (k % 9)) for k in range(LONG_RUN))
            buffer = Received(data)
            assert [hot.take(buffer), hot.has_more] == [TAKEN_MAX, True]
            assert [hot.take(buffer), hot.has_more] == [LONG_RUN - TAKEN_MAX, False]
            await until(lambda: not peer.session.unanswered_count)
            assert log.statistics().append_count == before + 2
            broker.context.topics.close_partitions("test", start=0, end=0)
            assert take_all(hot, data) == []

    asyncio.run(scenario())


LONG_RUN = 2 * TAKEN_MAX - 1
"""More puts than are taken in one step."""


def take_all(hot: HotPuts, data: bytes) -> list[int]:
    """Return how many puts were taken in each step."""
    buffer, counts = Received(data), list[int]()
    while buffer.position < len(data) and (count := hot.take(buffer)):
        counts.append(count)
    return counts


class Received:
    """Bytes of one read."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.position = 0


def _frames(raw: object) -> list[bytes]:
    assert isinstance(raw, bytes)
    parts = raw.replace(b"result ", b"\0result ").replace(b"value ", b"\0value ")
    return parts.split(b"\0")


@pytest.mark.parametrize(
    ("token", "number"),
    [
        (b"0", 0),
        (b"-1", -1),
        (b"+5", 5),
        (b"0000000007", 7),
        (b"-2147483648", -(2**31)),
        (b"2147483647", 2**31 - 1),
        (b"2147483648", None),
        (b"1_0", None),
        (b" 1", None),
        (b"", None),
        (b"-", None),
        ("٣".encode(), None),
    ],
)
def test_opaques_are_read_as_the_general_path_reads_them(
    token: bytes, number: int | None
) -> None:
    """The careful reader takes exactly Java's 32-bit numbers in ASCII."""
    assert read_i32(token) == number


def test_a_closed_partition_is_noticed_at_once(tmp_path: Path) -> None:
    """A log found before its partition was closed is not used after it."""

    async def scenario() -> None:
        async with running_broker(tmp_path / "data") as broker, Peer(broker) as peer:
            assert (await peer.ask(put() * 3)).count(b"result 200") == 3
            broker.context.topics.close_partitions("test", start=0, end=0)
            assert (await peer.ask(put() * 3)).count(b"result 403") == 3
            broker.context.topics.open_partitions("test", start=0, end=None)
            assert (await peer.ask(put() * 3)).count(b"result 200") == 3

    asyncio.run(scenario())


def test_ids_of_a_run_carry_into_the_milliseconds(tmp_path: Path) -> None:
    """More than 4096 puts within one millisecond get ids that only grow."""

    async def scenario() -> None:
        clock = ManualClock(wall_ms=NOW_MS)
        async with (
            running_broker(tmp_path / "data", clock=clock) as broker,
            Peer(broker) as peer,
        ):
            await peer.ask(put())
            replies = await peer.ask(put(payload=b"") * 10_000)
            bodies = [part.split(b"\r\n")[1] for part in replies.split(b"result ")[1:]]
            ids = [int(body.split(b" ")[0]) for body in bodies]
            offsets = [int(body.split(b" ")[2]) for body in bodies]
            assert ids == sorted(set(ids))
            assert offsets == list(range(25, 25 + 20 * 10_000, 20))

    asyncio.run(scenario())


@pytest.mark.slow
def test_a_session_remembers_topics_and_partitions_alone(tmp_path: Path) -> None:
    """Thousands of lengths, flags and spellings of a partition leave nothing in it."""
    forms = [
        *(put(payload=b"x" * length) for length in range(4000)),
        *(put(flag=flag) for flag in range(1000)),
        *(put(partition="0" * zeros) for zeros in range(1, 50)),
        *(put(partition=p) for p in (-1, 1)),
    ]

    async def scenario() -> None:
        async with running_broker(tmp_path / "data") as broker, Peer(broker) as peer:
            for partition in (0, 1):
                await peer.ask(put(partition=partition))
            hot = hot_puts_of(peer.session)
            tracemalloc.start()
            try:
                for some in (forms[at : at + 100] for at in range(0, len(forms), 100)):
                    replies = await peer.ask(b"".join(some))
                    assert replies.count(b"result 200") == len(some)
                snapshot = tracemalloc.take_snapshot()
            finally:
                tracemalloc.stop()
            remembered = snapshot.filter_traces(
                [tracemalloc.Filter(True, inspect.getfile(HotPuts))]
            )
            assert sum(each.size for each in remembered.traces) < 16 * 1024
            assert len(hot._targets) == 3

    asyncio.run(scenario())


@pytest.mark.parametrize(
    "frame",
    [
        put(),
        put(checksum=-1),
        put(partition=-1),
        put(partition=-1, checksum=-1, flag=7),
        b"put test 0 3 0 12\r\nold",
        b"put test -1 3 5 12\r\nold",
        put() + put(topic="meta-test") + put(partition=1) + put(flag=1),
    ],
)
def test_every_form_is_taken_by_the_loop(
    tmp_path: Path, frame: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One append for each log of a read, and nothing for the general path."""

    async def scenario() -> None:
        async with running_broker(tmp_path / "data") as broker, Peer(broker) as peer:
            for topic, partition in (("test", 0), ("test", 1), ("meta-test", 0)):
                await peer.ask(put(topic, partition))
            before = {log: log.statistics() for log in broker.context.topics.logs()}
            monkeypatch.setattr("metaq.broker.dispatch.handle_put", lambda *_a: 1 // 0)
            count = frame.count(b"put ") * 50
            assert (await peer.ask(frame * 50)).count(b"result 200") == count
            appended = 0
            for log, was in before.items():
                appended += log.record_count - was.record_count
                assert log.statistics().append_count - was.append_count <= 2
            assert appended == count

    asyncio.run(scenario())


def test_long_reads_of_every_form_are_taken(tmp_path: Path) -> None:
    """Without checksum, and to any partition; all of one read go to one."""

    async def scenario() -> None:
        async with running_broker(tmp_path / "data") as broker, Peer(broker) as peer:
            for partition in (0, 1):
                await peer.ask(put(partition=partition))
            hot = hot_puts_of(peer.session)
            for form in ({"checksum": -1}, {"partition": -1}):
                steps = [TAKEN_MAX, LONG_RUN - TAKEN_MAX]
                assert take_all(hot, put(**form) * LONG_RUN) == steps
                await until(lambda: not peer.session.unanswered_count)
            logs = broker.context.topics.logs()
            assert [log.record_count for log in logs] == [1 + LONG_RUN] * 2

    asyncio.run(scenario())


def test_a_partition_is_chosen_anew_for_each_read(tmp_path: Path, rng) -> None:
    """Puts to any partition go to all of them, and to a new one when it has a log."""

    async def scenario() -> None:
        async with running_broker(tmp_path / "data") as broker, Peer(broker) as peer:
            broker.context.topics.choose = rng.randrange
            for _ in range(40):
                await peer.ask(put(partition=-1) * 3)
            logs = {log.log_id: log for log in broker.context.topics.logs()}
            counts = [logs[LogId("test", p)].record_count for p in (0, 1)]
            assert sum(counts) == 120
            assert min(counts) > 3

    asyncio.run(scenario())


def test_a_stream_keeps_its_partition_for_some_reads(tmp_path: Path) -> None:
    """So that it does not keep the disk busy with all logs at once."""
    choices: list[int] = []

    def choose(count: int) -> int:
        choices.append(count)
        return len(choices) % count

    async def scenario() -> None:
        async with running_broker(tmp_path / "data") as broker, Peer(broker) as peer:
            broker.context.topics.choose = choose
            for partition in (0, 1, -1):
                await peer.ask(put(partition=partition) * 3)
            choices.clear()
            peer.session.hold(count=0, size_bytes=1)
            for _ in range(2 * ANY_READS_MAX):
                await peer.ask(put(partition=-1) * 3)
            assert len(choices) == 2
            peer.session.answer(b"", count=0, size_bytes=1)
            for _ in range(3):
                await peer.ask(put(partition=-1) * 3)
            assert len(choices) == 5

    asyncio.run(scenario())


def test_ordinary_puts_take_the_hot_path(tmp_path: Path) -> None:
    """The differential test compares two paths, not the general one with itself."""

    async def scenario() -> None:
        async with running_broker(tmp_path / "data") as broker, Peer(broker) as peer:
            await peer.ask(put())
            await peer.ask(put(partition=1))
            taken = []
            hot: Any = hot_puts_of(peer.session)
            original = hot.take

            def take(buffer: object) -> int:
                taken.append(original(buffer))
                return taken[-1]

            hot.take = take
            await peer.ask(put(opaque=-(2**31)) + put(opaque=2**31 - 1) + put(opaque=0))
            assert sum(taken) == 3
            # A single one does not even come so far.
            for form in ({}, {"checksum": -1}, {"opaque": -7}, {"partition": -1}):
                await peer.ask(put(**form) + put(**form))
                count = len(taken)
                assert (await peer.ask(put(**form))).startswith(b"result 200 ")
                assert len(taken) == count
            log = broker.context.topics.find_log("test", 0)
            assert log is not None
            assert log.log_id == LogId("test", 0)

    asyncio.run(scenario())


# -- in transactions ------------------------------------------------------------------

KEYS = ("TX:s:1", "XID:1:0a::uq", "TX:s:+1", "XID:1:0A::uq", "TX:s:2", "XID:1:bb::uq")
"""Two that are begun, spelt as they are and otherwise, and two that are not."""


def in_transaction(key: str, **fields: object) -> bytes:
    """Return a put that names a transaction; `old`: the form without checksum."""
    is_old = fields.pop("old", False)
    line, _, payload = put(**fields).partition(b"\r\n")  # type: ignore[arg-type]
    words = line.split(b" ")
    checksum = [] if is_old else [words[5]]
    line = b" ".join([*words[:5], *checksum, key.encode(), words[6]])
    return line + b"\r\n" + payload


TRANSACTIONAL = st.builds(
    in_transaction,
    st.sampled_from(KEYS),
    topic=st.sampled_from(["test", "meta-test", "nosuch"]),
    partition=st.sampled_from([0, 1, 1, -1, "01"]),
    payload=st.binary(max_size=40),
    checksum=st.sampled_from([None, None, -1, 7, "007"]),
    flag=st.sampled_from([0, 1, "+7"]),
    opaque=st.sampled_from([9, 10, -(2**31), "+5", "007"]),
    old=st.booleans(),
)
VERDICTS = st.sampled_from(
    [
        b"transaction TX:s:1 s COMMIT_ONE_PHASE 1\r\n",
        b"transaction TX:s:1 s BEGIN 1\r\n",
        b"transaction XID:1:0a::uq s PREPARE 1\r\n",
        b"transaction XID:1:0a::uq s COMMIT_ONE_PHASE 1\r\n",
        b"transaction XID:1:0a::uq s BEGIN 1\r\n",
    ]
)
BEGUN = [b"transaction %b s BEGIN 1\r\n" % key.encode() for key in KEYS[:2]]


def records_of(data: bytes) -> Iterator[bytes]:
    """Yield the records of a redo file: puts of a run come together in it."""
    position = 0
    while position < len(data):
        _record, end = decode_record(data, position, len(data))
        yield data[position:end]
        position = end


async def journal_of(data: Path, pieces: list[bytes], *, is_hot: bool) -> list[object]:
    """Return what a broker answered, journalled and stored."""
    clock = ManualClock(wall_ms=NOW_MS)
    async with running_broker(data, clock=clock) as broker, Peer(broker) as peer:
        if not is_hot:
            take_nothing(peer.session)
        answers = [await peer.ask(piece) for piece in pieces]
        replies = b"".join(answers).replace(b":%d'" % broker.port, b":PORT'")
        found: list[object] = [sorted(_frames(replies))]
        (redo,) = (data / "transactions").glob("redo.*")
        found.append(sorted(records_of(redo.read_bytes())))
    for path in sorted(data.glob("*/*.meta")):
        found += [path.name, path.read_bytes()]
    return found


@pytest.mark.slow
@settings(max_examples=30)
@given(frames=st.lists(TRANSACTIONAL | VERDICTS, min_size=1, max_size=25))
def test_in_transactions_both_paths_journal_the_same(frames: list[bytes]) -> None:
    """Whatever is put in transactions: the same replies, the same journal, the same
    records in the partitions. Each run of puts is one read, so that all of the loop's
    ways are taken.
    """
    # The first put to a partition makes its log, and is left to the general path.
    logs = [put(topic, p) for topic in ("test", "meta-test") for p in (0, 1)]
    runs = [
        b"".join(run)
        for _is_put, run in itertools.groupby(frames, lambda f: f.startswith(b"put"))
    ]
    pieces = [*logs, *BEGUN, *runs]
    with TemporaryDirectory() as directory:
        hot, slow = (
            asyncio.run(
                journal_of(Path(directory) / name, pieces, is_hot=name == "hot")
            )
            for name in ("hot", "slow")
        )
    assert hot == slow
