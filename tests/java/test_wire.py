"""One conversation with MetaQ's own broker, with ours and with the fake: one answer.

What is put here and how often decides what later commands find, so the brokers hear
the same commands in the same order. Ids differ, and are blanked.
"""

import random
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from metaq.model import MAX_OFFSET
from metaq.record.checksum import checksum
from metaq.testing.fake_broker import FakeBroker
from tests.java.server import JavaBroker
from tests.java.talk import CLOSED, SILENCE, Frame, Talk, blank_ids
from tests.matrix.scene import broker_arguments
from tests.rigs.process import BrokerProcess

TOPICS = {"test": 2, "wild-*": 1, "a.b": 1, "\u6d88\u606f": 1, "seg": 1}
SEGMENT_BYTES = 4000
SEED = 14
RANDOM_COUNT = 600

I32 = ("0", "1", "2", "-1", "-2", "+1", "-0", "007", "2147483647", "-2147483648")
NO_I32 = ("x", "", "1x", "1.0", "0x1", "2147483648", "-2147483649", "--1", "+")
I64 = ("0", "25", "26", "-1", "100000", str(MAX_OFFSET - 1), str(-(2**63)))
NO_I64 = ("x", "", "9223372036854775808", "-9223372036854775809")
PLACES = (
    "test", "wild-x", "wild-", "wild-*", "wild", "a.b", "axb", "nosuch", "\u6d88\u606f",
    "\u6d88\u606fx", "",
)  # fmt: skip
HELLO = checksum(b"hello")
WORDS = (
    "", " ", "x", "PUT test 0 5 0 1", "put", "puts", "get", "gets", "offset", "sync",
    "transaction", "result", "result 200", "result 200 x 1", "value", "value 0 5",
    "result 200 0 1", "q", "quit", "quit 5", "quux 1", "v", "v 3", "vxyz 3",
    "version", "version 3", "version 3 4", "version  3", "version x", "Version 3",
    "get test g 0 0 100", "get test g 0 0 100 1 more", "get test g 0 0 100 1 ",
    "get  g 0 0 100 1", "get test  0 0 100 1", " get test g 0 0 100 1",
    "offset test g 0 0", "offset test g 0 0 1 x y", "offset  g 0 0 1",
    "transaction TX:s1:1 s1 END 5", "transaction TX:s1 s1 BEGIN 5",
    "transaction XID:1:0a:0b s1 BEGIN 5", "transaction XID:1:0a:0b:q: s1 BEGIN 5",
    "transaction XID:1:zz:0b:q s1 BEGIN 5", "transaction TX:s1:1 s1 NOPE 5",
    "sync test 0 0 0 1 -1 3", "sync test 0 0 0 1 3", "sync test 0 0 0 1 2 3 4",
)  # fmt: skip
STATS = (
    "stats topics 1", "stats offsets 1", "stats realtime 1", "stats reset 1",
    "stats test 1", "stats wild-x 1", "stats wild-* 1", "stats nosuch 1",
    "stats TOPICS 1", "stats topics", "stats 5", "stats topics 5 6",
)  # fmt: skip
SILENT = {"transaction TX:s1:1 s1 END 5", "value 0 5", "result 200 0 1"}
"""Commands that are not answered, and leave the connection open."""


RECEIPT = re.compile(rb"-?\d{10,}( \d+ -?\d+)")
VERSIONS = re.compile(rb"0\.1|1\.4\.6\.2|metaq/.+")
OWN_LINES = re.compile(rb"durability |set ")
"""Lines of `stats` that MetaQ's broker has not."""

Key = tuple[int, str]
Answers = dict[Key, Frame | bytes | str]


def put(words: str, payload: bytes = b"hello") -> bytes:
    return f"put {words}\r\n".encode() + payload


DIFFERENT = [
    (b"version \xd9\xa3\r\n", "^result 200 ", CLOSED),
    (b"value 3\r\n", SILENCE, CLOSED),
    (put("nosuch -1 5 0 1"), "partition 'nosuch-0'", "partition 'nosuch--1'"),
    (put("wild-a/b 0 5 0 1"), "Create directory failed", "do not accept topic"),
    (put("a.b 0 5 0 null 1"), "NullTransactionId@.*started", "'null' has not been sta"),
    (b"stats help 1\r\n", "^result 200 (?!.*reset)", "^result 200 .*reset"),
]
"""Commands, and patterns of what MetaQ's broker and ours reply."""


def conversation() -> list[bytes]:
    """Return every form of every command, and what MetaQ makes of odd values."""
    texts: list[str] = [f"get {place} g 0 0 100 1" for place in PLACES]
    puts = [put(f"{place} {n} 5 0 1") for place in PLACES for n in (0, 1, 2)]
    puts += [put(f"test {n} 5 0 1") for n in (*I32, *NO_I32) if n != "-1"]
    puts += [put(f"test 0 5 {n} 1") for n in (*I32, *NO_I32)]
    puts += [put(f"test 0 5 0 {n}") for n in (*I32, *NO_I32)]
    sums = (HELLO, f"+{HELLO}", -1, -2, 0, 1, "1x", "+1")
    puts += [put(f"test 0 5 0 {one} 1") for one in sums]
    puts += [put(f"test 0 {n} 0 1") for n in ("5", "+5", "005")]
    puts += [put(f"test 0 {n} 0 1", b"") for n in ("0", "-0", *NO_I32, "-1")]
    puts += [put(f"test 2 5 0 {one} 1") for one in sums]
    puts += [put("test 0 5 0"), put("test 0 5 0 1 2 3 4"), put("test  5 0 1")]
    texts += [f"{form}" for form in WORDS]
    texts += [f"get test g {n} 0 100 1" for n in (*I32, *NO_I32)]
    texts += [f"get test g 0 0 {n} 1" for n in (*I32, *NO_I32, "25", "30", "1048577")]
    texts += [f"get test g 0 {n} 0 1" for n in NO_I64]
    for offset in (*I64, str(MAX_OFFSET), *NO_I64):
        texts += [f"{verb} 1" for verb in (f"offset test g 0 {offset}",)]
        if offset != "26":
            texts.append(f"get test g 0 {offset} 100 1")
    texts += STATS
    return [*puts, *(f"{text}\r\n".encode() for text in texts)]


def chance(seed: int, count: int) -> Iterator[bytes]:
    """Yield puts, gets and questions about offsets over segments that roll."""
    chosen = random.Random(seed)
    for opaque in range(10, 10 + count):
        payload = chosen.randbytes(chosen.choice((0, 5, 90, 900)))
        offset = chosen.choice((0, -1, chosen.randrange(80_000), MAX_OFFSET))
        topic = chosen.choice(("seg", "seg", "seg", "wild-x", "nosuch"))
        kind = chosen.random()
        if kind < 0.5:
            words = (
                f"{topic} 0 {len(payload)} {opaque % 7} {checksum(payload)} {opaque}"
            )
            yield put(words, payload)
        elif kind < 0.75:
            yield f"offset {topic} g 0 {offset} {opaque}\r\n".encode()
        else:
            size_bytes = chosen.choice((1, 20, 500, 9999))
            yield f"get {topic} g 0 {offset} {size_bytes} {opaque}\r\n".encode()


def hear(port: int, commands: Sequence[bytes]) -> Answers:
    """Return what a broker answers to commands, one after the other.

    Returns:
        By number and line of a command its reply; by place all that is in its log
        after all of them, if something was read there.
    """
    found: Answers = {}
    values: dict[Key, bytes] = {}
    with Talk(port) as talk:
        for number, command in enumerate(commands):
            line = command.partition(b"\r\n")[0].decode()
            reply = talk.ask(command, may_be_silent=line in SILENT)
            assert reply != SILENCE or line in SILENT, line
            found[number, line] = normal(reply, port)
            if isinstance(reply, Frame) and reply.head.startswith("value"):
                values[number, line] = reply.body
        logs = {place: read_log(talk, place) for place in map(place_of, values)}
    for key, body in values.items():
        offset = int(key[1].split(" ")[4])
        # Two brokers have other ids in their logs: each shows what is in its own.
        is_slice = logs[place_of(key)][offset:].startswith(body)
        found[key] = Frame(f"value {len(body)}", b"as stored" if is_slice else body)
    return found | {(-1, place): blank_ids(log) for place, log in logs.items()}


def place_of(key: Key) -> str:
    """Return topic, group and partition of a get, as it has them."""
    return " ".join(key[1].split(" ")[1:4])


def read_log(talk: Talk, place: str) -> bytes:
    data = b""
    while True:
        reply = talk.ask(f"get {place} {len(data)} 1048576 1\r\n".encode())
        assert isinstance(reply, Frame)
        if not reply.head.startswith("value"):
            return data
        data += reply.body


def normal(reply: Frame | str, port: int) -> Frame | str:
    """Blank ids, ports, versions, and what stands in lines that have no order."""
    if isinstance(reply, str):
        return reply
    head, body = reply
    _, status, *_, opaque = head.split(" ")
    if RECEIPT.fullmatch(body):
        return Frame(f"{status} {opaque}", RECEIPT.sub(rb"ID\1", body))
    if VERSIONS.fullmatch(body):
        return Frame(f"{status} {opaque}", b"VERSION")
    if body.startswith(b"STATS\r\n"):
        lines = body.split(b"\r\n")
        kept = sorted(one for one in lines[1:-2] if not OWN_LINES.match(one))
        return Frame(f"{status} {opaque}", b"\r\n".join([*kept, *lines[-2:]]))
    return (
        Frame(head, body)
        if b"'meta:" not in body
        else Frame(f"{status} {opaque}", body.replace(b":%d'" % port, b":PORT'"))
    )


@pytest.fixture(scope="module")
def commands() -> list[bytes]:
    return [*conversation(), *chance(SEED, RANDOM_COUNT)]


@pytest.fixture(scope="module")
def server(
    server_jars: list[Path],
    new_root: Callable[[], str],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[JavaBroker]:
    """Return a broker of MetaQ whose topics are this module's alone."""
    home = tmp_path_factory.mktemp("wire-java")
    system = {"maxSegmentSize": SEGMENT_BYTES}
    topics = {topic: {"numPartitions": count} for topic, count in TOPICS.items()}
    with JavaBroker(server_jars, home, new_root(), topics, system) as broker:
        yield broker


@pytest.fixture(scope="module")
def ours(
    new_root: Callable[[], str], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[BrokerProcess]:
    """Return a broker of ours with the same settings."""
    with BrokerProcess(
        tmp_path_factory.mktemp("wire") / "ours",
        topic="test",
        segment_bytes=SEGMENT_BYTES,
        arguments=[
            *broker_arguments(new_root(), 0, TOPICS),
            "--set=hostName=127.0.0.1",
            "--set=numPartitions=1",
        ],
    ) as broker:
        yield broker


@pytest.fixture(scope="module")
def told(server: JavaBroker, commands: list[bytes]) -> Answers:
    """Return what MetaQ's own broker answers."""
    return hear(server.port, commands)


def differences(told: Answers, found: Answers) -> list[tuple[Key, object, object]]:
    assert told.keys() == found.keys()
    return [(key, told[key], found[key]) for key in told if told[key] != found[key]]


def test_our_broker_answers_as_metaq_does(
    told: Answers, ours: BrokerProcess, commands: list[bytes]
) -> None:
    """Every command, form and odd value; segments that roll; every refusal's text."""
    assert len(commands) > RANDOM_COUNT + 200
    assert differences(told, hear(ours.port, commands)) == []


def test_the_fake_answers_as_metaq_does(told: Answers, commands: list[bytes]) -> None:
    """The stand-in of the client's tests behaves as MetaQ 1.4."""
    with FakeBroker(TOPICS) as fake:
        found = hear(fake.port, commands)
    wrong = [
        one
        for one in differences(told, found)
        # It has one segment for each log until it is told to roll.
        if not {"seg", "wild-x"}.intersection(str(one[0][1]).split(" "))
    ]
    assert wrong == []


@pytest.mark.parametrize(("command", "theirs", "own"), DIFFERENT)
def test_what_differs_on_purpose(
    server: JavaBroker, ours: BrokerProcess, command: bytes, theirs: str, own: str
) -> None:
    """docs/protocol.md has a row for each."""
    for port, expected in ((server.port, theirs), (ours.port, own)):
        with Talk(port) as talk:
            reply = talk.ask(command, may_be_silent=expected is SILENCE)
        shown = reply if isinstance(reply, str) else f"{reply.head} {reply.body!r}"
        assert re.search(expected, shown), shown
