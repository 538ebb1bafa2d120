"""Payloads of `take` and `settle`: golden bytes, round trips, what is refused."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from metaq.errors import RemoteProtocolError
from metaq.model import Offset
from metaq.protocol.queue_frames import (
    REASON_BYTES_MAX,
    SETTLE_COUNT_MAX,
    QueueDelivery,
    Settlement,
    SettleVerb,
    TakenReply,
    Word,
    decode_settlements,
    decode_taken,
    decode_words,
    encode_settlements,
    encode_taken,
    encode_words,
)

DELIVERIES = [
    QueueDelivery(Offset(256), (2 << 32) + 1, 1),
    QueueDelivery(Offset(40), 3, 16),
]
ENTRIES = [
    Settlement(Offset(1), 2, SettleVerb.ACK),
    Settlement(Offset(3), 4, SettleVerb.REJECT, 0, "nö"),
    Settlement(Offset(5), 6, SettleVerb.NACK, -1),
]
OFFSETS = st.integers(0, 2**63 - 1).map(Offset)
NUMBERS = st.integers(0, 2**64 - 1)


def test_a_reply_to_a_take_has_these_bytes() -> None:
    """Partition, lease, count; then a row for each delivery."""
    raw = encode_taken(3, 30_000, DELIVERIES)
    assert raw == bytes.fromhex(
        "00000003 00007530 00000002"
        "0000000000000100 0000000200000001 0001"
        "0000000000000028 0000000000000003 0010"
    )
    assert decode_taken(raw + b"runs") == TakenReply(3, 30_000, DELIVERIES, len(raw))


def test_a_settle_has_these_bytes() -> None:
    """A row for each entry; the texts after the last one."""
    raw = encode_settlements(ENTRIES)
    assert (
        raw
        == bytes.fromhex(
            "0000000000000001 0000000000000002 01 0000000000000000"
            "0000000000000003 0000000000000004 05 0000000000000003"
            "0000000000000005 0000000000000006 02 ffffffffffffffff"
        )
        + "nö".encode()
    )
    assert decode_settlements(raw, 3) == [
        ENTRIES[0],
        ENTRIES[1]._replace(argument=3),
        ENTRIES[2],
    ]


@given(st.integers(-1, 2**31 - 1), st.integers(0, 2**32 - 1), st.data())
def test_takes_read_back(partition: int, lease_ms: int, data: st.DataObject) -> None:
    """Any numbers of the wire."""
    rows = st.builds(QueueDelivery, OFFSETS, NUMBERS, st.integers(1, 2**16 - 1))
    deliveries = data.draw(st.lists(rows, max_size=5))
    raw = encode_taken(partition, lease_ms, deliveries)
    assert decode_taken(raw) == TakenReply(partition, lease_ms, deliveries, len(raw))


@given(st.text(max_size=2000))
def test_a_long_reason_is_cut_between_characters(text: str) -> None:
    """Whatever it is made of."""
    entry = Settlement(Offset(1), 2, SettleVerb.REJECT, 0, text)
    (found,) = decode_settlements(encode_settlements([entry]), 1)
    assert len(found.text.encode()) <= REASON_BYTES_MAX
    assert text.encode(errors="replace").decode().startswith(found.text)


@pytest.mark.parametrize("count", [0, -1, SETTLE_COUNT_MAX + 1, 4])
def test_a_wrong_count_is_refused(count: int) -> None:
    """More or fewer entries than there are, or than are allowed."""
    with pytest.raises(RemoteProtocolError, match="settle: expected"):
        decode_settlements(encode_settlements(ENTRIES), count)


def test_a_settle_has_so_many_entries_at_most() -> None:
    """With all of their bytes there."""
    entries = [Settlement(Offset(1), 2, SettleVerb.ACK)] * SETTLE_COUNT_MAX
    found = decode_settlements(encode_settlements(entries), len(entries))
    assert found == entries
    entries.append(entries[0])
    with pytest.raises(RemoteProtocolError, match=f"1 to {SETTLE_COUNT_MAX} deliv"):
        decode_settlements(encode_settlements(entries), len(entries))


@pytest.mark.parametrize(
    "entry",
    [
        Settlement(Offset(-1), 2, SettleVerb.ACK),
        Settlement(Offset(1), 2, SettleVerb.ACK, 1),
        Settlement(Offset(1), 2, SettleVerb.NACK, -2),
        Settlement(Offset(1), 2, SettleVerb.EXTEND, 0),
    ],
)
def test_an_entry_that_makes_no_sense_is_refused(entry: Settlement) -> None:
    """Its numbers are named."""
    with pytest.raises(RemoteProtocolError, match=f"argument {entry.argument}"):
        decode_settlements(encode_settlements([entry]), 1)


def test_damage_is_one_error() -> None:
    """Cuts and any bytes: values, or an error."""
    rng = random.Random(1)
    for raw, decode in (
        (encode_taken(3, 30_000, DELIVERIES), decode_taken),
        (encode_settlements(ENTRIES), lambda raw: decode_settlements(raw, 3)),
    ):
        for size in range(len(raw)):
            with pytest.raises(RemoteProtocolError):
                decode(raw[:size])
        for _ in range(3_000):
            damaged = bytearray(raw)
            damaged[rng.randrange(len(raw))] = rng.randrange(256)
            try:
                decode(bytes(damaged))
            except RemoteProtocolError:
                continue


def test_words_are_one_for_each_entry() -> None:
    """In their order."""
    words = [*Word]
    assert encode_words(words) == b"ok done lost later"
    assert decode_words("ok done lost later", 4) == words
    for body in ("", "ok", "ok done lost later ok", "ok done lost never"):
        with pytest.raises(RemoteProtocolError, match="settle: expected 4 words"):
            decode_words(body, 4)
