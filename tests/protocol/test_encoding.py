"""Values that may not travel are refused before they do."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from metaq.errors import LocalProtocolError
from metaq.model import LocalTransactionId, TransactionId, XaTransactionId
from metaq.protocol.commands import (
    Answer,
    Cancel,
    Check,
    Command,
    CountQuestion,
    Find,
    Follow,
    Get,
    Listen,
    ListScheduled,
    Mput,
    OffsetQuery,
    Put,
    Quit,
    SplitQuestion,
    Stats,
    TimeQuestion,
    TransactionCommand,
    TransactionType,
    Version,
)
from metaq.protocol.encoding import encode, encode_puts, encode_value_line

LOCAL = LocalTransactionId("s", 1)
BEGIN = TransactionType.BEGIN
REFUSED: list[Command] = [
    Put("", 0, b"", 0, 0, 0),
    Put("a b", 0, b"", 0, 0, 0),
    Put("a\r", 0, b"", 0, 0, 0),
    Put("a\n", 0, b"", 0, 0, 0),
    Put("\ud800", 0, b"", 0, 0, 0),
    Put("t", 2**31, b"", 0, 0, 0),
    Put("t", 0, b"", -(2**31) - 1, 0, 0),
    Put("t", 0, b"", 0, 0, 2**31),
    Put("t", 0, b"", 0, 0, 0, LocalTransactionId("a:b", 1)),
    Put("t", 0, b"", 0, 0, 0, LocalTransactionId("s", 2**31)),
    Put("t", 0, b"", 0, 0, 0, XaTransactionId(1, b"", b"", " ")),
    Mput("t", 0, -1, 0, 0, b""),
    Mput("t", 0, 0, 0, 0, b"", None, 0),
    Mput("t", 0, 0, 0, 0, b"", "p", -1),
    Mput("t", 0, 0, 0, 0, b"", "p", 2**63),
    Mput("t", 0, 0, 0, 0, b"", "-", 0),
    Mput("t", 0, 0, 0, 0, b"", "", 0),
    Mput("t", 0, 0, 0, 0, b"", "a/b", 0),
    Mput("t", 0, 0, 0, 0, b"", "x" * 65, 0),
    Mput("t", 0, 0, 0, 0, b"", "p", 0, LocalTransactionId("s", 1)),
    Mput("t", 0, 0, 0, 0, b"", transaction=LocalTransactionId("a:b", 1)),
    Mput("t", 0, 0, 0, 0, b"", deliver_ms=-2),
    Mput("t", 0, 0, 0, 0, b"", deliver_ms=2**63),
    Get("t", "g", 0, 0, 25, 2, where="\ud800"),
    Cancel("", b"", 0),
    Cancel("t t", b"", 0),
    Find("", 0, b"", 0, 1),
    Find("t", 2**31, b"", 0, 1),
    Find("t", 0, b"", 0, -1),
    Find("t", 0, b"", 0, 1, -1),
    Find("t", 0, b"", 0, 1, 0, 2**63),
    Find("t", 0, b"", 0, 1, 0, 0, -1),
    Find("t", 0, b"", 0, 1, others=(2**31,)),
    ListScheduled("t", -1, 0),
    ListScheduled("", 0, 0),
    ListScheduled("t", 0, 0, -1),
    ListScheduled("t", 0, 0, 2**63),
    Listen("a" * 31, 0),
    Listen("A" * 32, 0),
    Listen("a" * 32, 0, -1),
    Answer("a" * 33, 0, b"", 0),
    Answer("a" * 32, -1, b"", 0),
    Answer("a" * 32, 2**63, b"", 0),
    Get("t", "", 0, 0, 0, 0),
    Get("t", "g", 0, 2**63, 0, 0),
    Get("t", "g", 0, 0, 0, 0, -1),
    OffsetQuery("t", "g g", 0, 0, 0),
    OffsetQuery("t", "g", 0, 0, 0, TimeQuestion(-1)),
    OffsetQuery("t", "g", 0, 0, 0, CountQuestion(2**63)),
    OffsetQuery("t", "g", 0, 0, 0, SplitQuestion(0, 2**31)),
    Check("t t", 0, 0, 1, 0),
    Check("t", 0, 2**63, 1, 0),
    Check("t", 0, 0, 2**31, 0),
    Follow("", b"", 0),
    Follow("a b", b"", 0),
    Follow("pull", b"", 2**31),
    Version(2**31),
    Stats("", 2**31),
    Stats(" ", 0),
    TransactionCommand(LOCAL, "s s", BEGIN, 0),
    TransactionCommand(LOCAL, "s", BEGIN, 0, -1),
    TransactionCommand(LOCAL, "s", BEGIN, 0, 2**31, "q"),
    TransactionCommand(LOCAL, "s", BEGIN, 0, 0, ""),
]


@pytest.mark.parametrize("command", REFUSED, ids=repr)
def test_what_would_be_misread_is_refused(command: Command) -> None:
    """Names with separators and numbers out of range never reach the wire."""
    with pytest.raises(LocalProtocolError):
        encode(command)


I32 = st.integers(-(2**31), 2**31 - 1)


@given(
    puts=st.lists(st.tuples(st.binary(max_size=9), I32, I32), min_size=1, max_size=9),
    topic=st.sampled_from(["t", "%d%%", "t\u00e9"]),
    partition=I32,
    first=st.integers(0, 2**31 - 10),
    transaction=st.sampled_from(
        [None, LocalTransactionId("s%d", 1), XaTransactionId(1, b"g", b"", "q%s")]
    ),
)
def test_puts_of_a_run_are_what_each_is_alone(
    puts: list[tuple[bytes, int, int]],
    topic: str,
    partition: int,
    first: int,
    transaction: TransactionId | None,
) -> None:
    """The one operation writes the bytes that one call per put writes."""
    payloads, flags, checksums = zip(*puts, strict=True)
    opaques = range(first, first + len(puts))

    def run(flags: tuple[int, ...] | None) -> bytes:
        return encode_puts(
            topic, partition, payloads, flags=flags, checksums=checksums,
            opaques=opaques, transaction=transaction,
        )  # fmt: skip

    alone = [
        Put(topic, partition, payload, flag, crc, opaque, transaction)
        for (payload, flag, crc), opaque in zip(puts, opaques, strict=True)
    ]
    assert run(flags) == b"".join(map(encode, alone))
    assert run((0,) * len(puts)) == run(None)


@pytest.mark.parametrize(
    ("topic", "flag", "crc", "first"),
    [
        ("a b", 0, 0, 0),
        ("t", 2**31, 0, 0),
        ("t", 0, -(2**31) - 1, 0),
        ("t", 0, 0, 2**31 - 1),
    ],
)
def test_a_run_of_puts_is_refused_like_each(
    topic: str, flag: int, crc: int, first: int
) -> None:
    """Whatever one put could not be written with."""
    with pytest.raises(LocalProtocolError):
        encode_puts(
            topic, 0, [b"", b""], flags=[0, flag], checksums=[crc, 0],
            opaques=range(first, first + 2),
        )  # fmt: skip


def test_quit_is_one_word() -> None:
    """The one command without an opaque."""
    assert encode(Quit()) == b"quit\r\n"


def test_a_value_line_announces_bytes_sent_apart() -> None:
    """A broker sends the line, then file bytes."""
    assert encode_value_line(25, -3) == b"value 25 -3\r\n"
