"""Messages of replicas: they read back, and what is wrong in them is named."""

import contextlib
import json
import random
import struct
from collections.abc import Callable
from dataclasses import replace
from zlib import crc32

import pytest
from hypothesis import given
from hypothesis import strategies as st

from metaq.errors import RemoteProtocolError
from metaq.model import LogId, MessageId, Offset, SizeBytes
from metaq.replication import messages
from metaq.replication.election import Flag
from metaq.replication.epochs import CopyFacts, Epoch, EpochStart
from metaq.replication.messages import (
    Chunk,
    Data,
    JoinLog,
    JoinReply,
    JoinRequest,
    LogAnswer,
    Pull,
    TablesReply,
    TablesRequest,
    TailReply,
    TailRequest,
)
from metaq.replication.progress import JoinAnswer
from metaq.storage.producers import StoredBatch

I64 = 2**63 - 1
OFFSETS = st.integers(0, I64).map(Offset)
NUMBERS = st.integers(0, 2**64 - 1)
COUNTS = st.integers(0, I64)
TEXTS = st.text(max_size=9)
EPOCHS = st.builds(Epoch, COUNTS, TEXTS)
TABLES = st.lists(st.builds(EpochStart, EPOCHS, OFFSETS), max_size=4).map(tuple)
LOG_IDS = st.builds(LogId, TEXTS, st.integers(0, 2**31 - 1))


@st.composite
def copies(draw: Callable[..., object]) -> CopyFacts:
    start, end = sorted((draw(OFFSETS), draw(OFFSETS)))  # type: ignore[type-var]
    number, hw, table = draw(NUMBERS), draw(OFFSETS), draw(TABLES)
    return CopyFacts(number, start, end, hw, table)  # type: ignore[arg-type]


LOGS = st.builds(JoinLog, LOG_IDS, copies())
ANSWERS = st.builds(
    LogAnswer, LOG_IDS, st.builds(JoinAnswer, copies(), OFFSETS, OFFSETS)
)


E1 = Epoch(1, "m")


def batch(offset: int, size: int) -> StoredBatch:
    return StoredBatch(
        "a.producer-1", 7, 3, -5, MessageId(-9), Offset(offset), SizeBytes(size)
    )


def chunk(
    body: bytes = b"records", offset: int = 100, number: int = 2**64 - 1
) -> Chunk:
    return Chunk(
        number,
        Offset(offset),
        SizeBytes(len(body)),
        3,
        MessageId(-1),
        crc32(body),
        Offset(0),
        (batch(offset, 2), batch(offset + 2, 4)) if len(body) > 5 else (),
        (body,),
    )


CHUNKS = st.builds(
    chunk, st.binary(min_size=1, max_size=40), COUNTS.map(lambda n: n // 2)
)
DATA = st.builds(
    Data,
    EPOCHS,
    st.lists(st.tuples(NUMBERS, OFFSETS, OFFSETS), max_size=3).map(tuple),
    st.lists(CHUNKS, max_size=3).map(tuple),
    st.lists(ANSWERS, max_size=2).map(tuple),
    st.lists(NUMBERS, max_size=2).map(tuple),
)
VALUES: dict[str, tuple[st.SearchStrategy[object], Callable, Callable]] = {
    "join": (
        st.builds(
            JoinRequest, TEXTS, EPOCHS, COUNTS, COUNTS, TEXTS, COUNTS,
            st.sampled_from(Flag), st.lists(LOGS, max_size=3).map(tuple),
        ),
        messages.JOIN.encode,
        messages.JOIN.decode,
    ),
    "join reply": (
        st.builds(
            JoinReply, EPOCHS, st.lists(ANSWERS, max_size=3).map(tuple),
            st.lists(NUMBERS, max_size=3).map(tuple), st.booleans(),
        ),
        messages.JOIN.encode_answer,
        messages.JOIN.decode_answer,
    ),
    "pull": (
        st.builds(
            Pull, EPOCHS, COUNTS, COUNTS, COUNTS,
            st.lists(st.tuples(NUMBERS, OFFSETS), max_size=3).map(tuple),
            COUNTS,
        ),
        messages.encode_pull,
        messages.decode_pull,
    ),
    "data": (DATA, messages.encode_data, messages.decode_data),
    "tables": (
        st.builds(TablesRequest, TEXTS, EPOCHS, COUNTS),
        messages.TABLES.encode,
        messages.TABLES.decode,
    ),
    "tables reply": (
        st.builds(
            TablesReply, st.lists(LOGS, max_size=3).map(tuple),
            st.integers(-(2**63), I64).map(MessageId),
        ),
        messages.TABLES.encode_answer,
        messages.TABLES.decode_answer,
    ),
    "tail": (
        st.builds(
            TailRequest, TEXTS, EPOCHS, NUMBERS, OFFSETS, COUNTS, st.booleans(),
            st.none() | copies(),
        ),
        messages.TAIL.encode,
        messages.TAIL.decode,
    ),
    "tail reply": (
        st.builds(TailReply, st.none() | CHUNKS, st.booleans()),
        messages.TAIL.encode_answer,
        messages.TAIL.decode_answer,
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", VALUES)
@given(data=st.data())
def test_a_message_reads_back_as_it_was(kind: str, data: st.DataObject) -> None:
    """Every kind, with any values in range."""
    values, encode, decode = VALUES[kind]
    value = data.draw(values)
    assert decode(encode(value)) == value


@pytest.mark.parametrize("kind", VALUES)
@given(data=st.data())
def test_damaged_messages_raise_nothing_else(kind: str, data: st.DataObject) -> None:
    """A peer that breaks the rules costs its connection, and no traceback."""
    values, encode, decode = VALUES[kind]
    raw = bytearray(encode(data.draw(values)))
    rng = random.Random(data.draw(st.integers(0, 2**32)))
    for _ in range(rng.randrange(1, 4)):
        at = rng.randrange(len(raw))
        raw[at : at + rng.randrange(3)] = rng.randbytes(rng.randrange(3))
        raw = raw or bytearray(b"\0")
    with contextlib.suppress(RemoteProtocolError):
        decode(bytes(raw))


def packed(head: object, rest: bytes = b"") -> bytes:
    data = json.dumps(head).encode()
    return len(data).to_bytes(4, "big") + data + rest


STREAM: dict[str, tuple[bytes, Callable]] = {
    "pull": (
        messages.encode_pull(Pull(Epoch(3, "n"), 2, 5, 7, ((1, Offset(10)),), 9)),
        messages.decode_pull,
    ),
    "data": (
        messages.encode_data(
            Data(Epoch(3, "n"), ((7, Offset(9), Offset(1)),), (chunk(), chunk(b"x")))
        ),
        messages.decode_data,
    ),
}


@pytest.mark.parametrize("kind", STREAM)
def test_every_flipped_bit_of_the_stream_is_found(kind: str) -> None:
    """Nothing of a message is believed, whichever of its bits is another one."""
    raw, decode = STREAM[kind]
    for bit in range(8 * len(raw)):
        damaged = bytearray(raw)
        damaged[bit // 8] ^= 1 << bit % 8
        with pytest.raises(RemoteProtocolError, match="expected"):
            decode(bytes(damaged))


@pytest.mark.parametrize("kind", STREAM)
def test_a_message_of_the_stream_that_is_cut_is_refused(kind: str) -> None:
    """At each of its bytes; and where a byte follows it."""
    raw, decode = STREAM[kind]
    for size in range(len(raw)):
        with pytest.raises(RemoteProtocolError, match="expected"):
            decode(raw[:size])
    with pytest.raises(RemoteProtocolError, match="1 bytes belong to no chunk"):
        decode(raw + b"x")


@pytest.mark.parametrize("kind", STREAM)
@given(data=st.data())
def test_a_head_with_its_checksum_raises_nothing_else(
    kind: str, data: st.DataObject
) -> None:
    """A replica with a bug costs its stream, and no traceback."""
    raw, decode = STREAM[kind]
    head = bytearray(raw[12:])
    at = data.draw(st.integers(0, len(head)))
    head[at : at + data.draw(st.integers(0, 20))] = data.draw(st.binary(max_size=20))
    with contextlib.suppress(RemoteProtocolError):
        decode(sealed(raw[:4], bytes(head)))


def sealed(mark: bytes, head: bytes) -> bytes:
    return struct.pack(">4sII", mark, len(head), crc32(head)) + head


def test_the_heads_of_the_stream_are_these_bytes() -> None:
    """The layout that the head of the module shows."""
    pull = struct.pack(">QQQQQ?B", 3, 2, 5, 7, 9, False, 1) + b"n"
    assert STREAM["pull"][0] == sealed(b"pul1", pull + struct.pack(">QQ", 1, 10))
    gone = Data(Epoch(3, "n"), ((7, Offset(9), Offset(1)),), gone=(5,))
    data = struct.pack(">QIIB", 3, 1, 0, 1) + b"n" + struct.pack(">QQQ", 7, 9, 1)
    assert messages.encode_data(gone) == sealed(b"dat1", data + b"[[],[5]]")


ROW = (7, 5, 1, 1, -1, crc32(b"x"), 0, 0, 0)


@pytest.mark.parametrize(
    ("mark", "head", "text"),
    [
        (b"pul1", struct.pack(">QQQQQ?B", 2**63, 2, 5, 7, 9, 0, 0), "pull: expected 0"),
        (
            b"pul1",
            struct.pack(">QQQQQ?BQQ", 1, 2, 5, 7, 9, 0, 0, 1, 2**63),
            "pull: exp",
        ),
        (b"pul1", struct.pack(">QQQQQ?BB", 1, 2, 5, 7, 9, 0, 1, 255), "pull: 'utf-8'"),
        (b"pul1", struct.pack(">QQQQQ?BB", 1, 2, 5, 7, 9, 0, 0, 255), "pull: iter"),
        (b"pul1", b"x", "pull: unpack_from requires"),
        (b"dat1", struct.pack(">QIIB", 1, 2**32 - 1, 0, 0), "head: expected"),
        (b"dat1", struct.pack(">QIIBQQQ", 1, 1, 0, 0, 7, 2**63, 0), "data: expected 0"),
        (b"dat1", struct.pack(">QIIB", 1, 0, 0, 0) + b"[", "data: "),
        (b"dat1", struct.pack(">QIIB", 1, 0, 0, 0) + b"[[],[-1]]", "gone: expected 0"),
        *[
            (
                b"dat1",
                struct.pack(">QIIB", 1, 0, 1, 0)
                + struct.pack(">QQIIqIQII", *ROW[:at], wrong, *ROW[at + 1 :]),
                f"{name}: expected",
            )
            for at, wrong, name in (
                (1, 2**63, "offset"),
                (2, 0, "size_bytes"),
                (3, 0, "record_count"),
                (6, 2**63, "segment"),
                (7, 1, "chunk"),
            )
        ],
    ],
)
def test_what_contradicts_a_head_is_named(mark: bytes, head: bytes, text: str) -> None:
    """Its checksum is right: the peer has a bug."""
    decode = messages.decode_pull if mark == b"pul1" else messages.decode_data
    with pytest.raises(RemoteProtocolError, match=text):
        decode(sealed(mark, head))


def test_a_replica_of_another_version_is_named() -> None:
    """Its heads have another mark, and an operator can act on the sentence."""
    text = "the other replica has a version of metaq with other messages"
    for _, decode in STREAM.values():
        for other in (b"", b"pul2" + STREAM["pull"][0][4:], packed({"epoch": [1, ""]})):
            with pytest.raises(RemoteProtocolError, match=text):
                decode(other)


TAIL = {
    "set_id": "s", "epoch": [3, "n"], "number": 7, "offset": 5, "max_bytes": 9,
}  # fmt: skip


def test_a_tail_without_a_copy_is_of_a_claimer() -> None:
    """It may be left out; with it, it is a copy as a join has it."""
    request = TailRequest("s", Epoch(3, "n"), 7, Offset(5), 9)
    whole = TAIL | {"is_unchecked": False}
    assert json.loads(messages.TAIL.encode(request)[4:]) == whole | {"copy": None}
    assert messages.TAIL.decode(packed(TAIL)) == request
    copy = CopyFacts(7, Offset(1), Offset(4), Offset(3), (EpochStart(E1, Offset(1)),))
    head = whole | {"copy": COPY}
    assert messages.TAIL.decode(packed(head)) == replace(request, copy=copy)
    assert json.loads(messages.TAIL.encode(replace(request, copy=copy))[4:]) == head


COPY = {"number": 7, "start": 1, "end": 4, "hw": 3, "table": [[[1, "m"], 1]]}


@pytest.mark.parametrize(
    ("copy", "text"),
    [
        (COPY | {"start": 5}, "copy: log 7 starts at 5, ends at 4"),
        (COPY | {"number": 2**64}, "number: expected 0 to"),
        (COPY | {"table": [[[1, "m"], -1]]}, "start: expected 0 to"),
        (COPY | {"table": [[1, "m", 1]]}, "table: expected 2 items"),
        (COPY | {"table": None}, "table: expected a list, got None"),
        ({}, "number: expected 0 to .*, got None"),
        ([7, 1, 4, 3, []], "copy: expected an object"),
    ],
)
def test_a_copy_that_is_none_is_refused(copy: object, text: str) -> None:
    """In a tail as in a join."""
    with pytest.raises(RemoteProtocolError, match=text):
        messages.TAIL.decode(packed(TAIL | {"copy": copy}))
    join = {
        "set_id": "s", "epoch": [1, "m"], "replica": 2, "incarnation": 1, "token": "t",
        "revision": 1, "flag": "",
        "logs": [{"log_id": {"topic": "topic", "partition": 0}, "copy": copy}],
    }  # fmt: skip
    with pytest.raises(RemoteProtocolError, match=text):
        messages.JOIN.decode(packed(join))


def test_chunks_belong_to_answers_alone() -> None:
    """A question with chunks is read without them, also where they fit."""
    raw = messages.TAIL.encode_answer(TailReply(chunk()))
    size = int.from_bytes(raw[:4], "big")
    head = json.loads(raw[4 : 4 + size]) | TAIL
    assert messages.TAIL.decode(packed(head, raw[4 + size :])).number == 7


@pytest.mark.parametrize(
    ("payload", "text"),
    [
        (b"", "expected a head"),
        (b"\0\0\0\7{}", "belong to no chunk|expected"),
        (packed([1]), "expected an object"),
        (b"\0\0\0\2\xff\xff", "expected a head"),
        (packed({"epoch": [1, ""]}, b"xy"), "2 bytes belong to no chunk"),
    ],
)
def test_what_is_no_message_is_refused(payload: bytes, text: str) -> None:
    """Too short, no JSON, no object, or bytes that nothing announces."""
    with pytest.raises(RemoteProtocolError, match=text):
        messages.TABLES.decode(payload)


def test_one_flipped_bit_of_a_chunk_is_found() -> None:
    """In its bytes and in its notes: nothing of it is appended then."""
    raw = messages.TAIL.encode_answer(TailReply(chunk(b"x" * 9)))
    body = len(raw) - 9
    notes = body - 2 * 104
    for at in (body, len(raw) - 1, notes, body - 1):
        damaged = bytearray(raw)
        damaged[at] ^= 1
        with pytest.raises(RemoteProtocolError, match="checksum"):
            messages.TAIL.decode_answer(bytes(damaged))


def test_a_chunk_that_is_cut_is_refused() -> None:
    """With both sizes."""
    raw = messages.encode_data(Data(Epoch(1, "n"), chunks=(chunk(b"x" * 5),)))
    with pytest.raises(RemoteProtocolError, match="expected 5 bytes, got 4"):
        messages.decode_data(raw[:-1])


def test_a_note_outside_of_its_chunk_is_refused() -> None:
    """A batch is believed where its bytes are, and nowhere else."""
    found = chunk(b"x" * 9)
    for other in (batch(99, 2), batch(108, 2)):
        wrong = messages.Data(
            Epoch(1, "n"),
            chunks=(
                Chunk(
                    found.number, found.offset, found.size_bytes, 1, found.last_id,
                    found.crc32, found.segment, (other,), found.body,
                ),
            ),
        )  # fmt: skip
        with pytest.raises(RemoteProtocolError, match="is not in it"):
            messages.decode_data(messages.encode_data(wrong))


def test_two_chunks_are_no_tail() -> None:
    """A tail is asked for one range."""
    row = [7, 5, 1, 1, -1, crc32(b"x"), 0, 0, 0]
    raw = packed({"chunks": [row, row]}, b"xx")
    with pytest.raises(RemoteProtocolError, match="expected 1 chunk, got 2"):
        messages.TAIL.decode_answer(raw)
