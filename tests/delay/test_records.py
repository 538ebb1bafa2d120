"""Records of `__delays`, byte for byte."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from metaq.delay.plan import NOTHING_DONE, TIERS, Progress
from metaq.delay.records import (
    TRIES_MAX,
    DelayHead,
    DelayKind,
    DelayState,
    cancelled_at,
    decode_head,
    decode_state,
    encode_cancelled,
    encode_head,
    encode_state,
)
from metaq.errors import CorruptRecordError
from metaq.model import MessageId, Offset

HEAD = encode_head(1_900_000_000_000, MessageId(7), "topic", -1, 3, tries=2)
STATE = DelayState(
    5,
    ((Progress(1, 2, 3), Progress(4, 5, 2)), *[(NOTHING_DONE,)] * (TIERS - 1)),
    {"gone": (1, 2, 3, 4)},
)


def test_the_head_of_a_batch() -> None:
    """The records follow it."""
    assert HEAD.hex() == (
        "01" "000001ba60d33800" "0000000000000007" "ffffffff" "0002" "00000003" "0005"
        + b"topic".hex()
    )  # fmt: skip
    head = DelayHead(
        DelayKind.MESSAGES, 1_900_000_000_000, MessageId(7), "topic", -1, 2, 3, 34
    )
    assert decode_head(HEAD + b"records") == head


def test_what_cancels_a_message() -> None:
    """It has due time and topic of the record, the place in it, and its offset."""
    payload = encode_cancelled(decode_head(HEAD), 1, 8, Offset(50), 100)
    assert payload.hex() == (
        "02" "000001ba60d33800" "0000000000000008" "ffffffff" "0000" "00000001" "0005"
        + b"topic".hex() + "0000000000000032" "00000021"
    )  # fmt: skip
    head = decode_head(payload)
    assert (head.kind, head.messages, head.id) == (DelayKind.CANCELLED, 1, 8)
    assert cancelled_at(payload, head) == (50, 33)
    with pytest.raises(CorruptRecordError):
        cancelled_at(payload[:-1], head)


def test_what_was_delivered() -> None:
    """Steps of four tiers, and topics that were deleted."""
    nothing = "0001" + "f" * 32 + "0" * 16
    assert encode_state(STATE).hex() == (
        "03" "0000000000000005" "0002"
        + "".join(f"{number:016x}" for number in (1, 2, 3, 4, 5, 2))
        + 3 * nothing + "0001" + "".join(f"{n:016x}" for n in (1, 2, 3, 4)) + "0004"
        + b"gone".hex()
    )  # fmt: skip
    assert decode_state(encode_state(STATE)) == STATE
    assert decode_state(encode_state(DelayState())) == DelayState()


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        HEAD[:-1],
        b"\x03" + HEAD[1:],
        b"\x09" + HEAD[1:],
        b"\1" + b"\xff" * 33,
        encode_head(5, MessageId(1), "", 0, 1),
        encode_head(-1, MessageId(1), "t", 0, 1),
        HEAD.replace(b"topic", b"\xff" * 5),
    ],
)
def test_other_bytes_are_no_head(payload: bytes) -> None:
    """Cut, of another kind, without a name, due before all times."""
    with pytest.raises(CorruptRecordError):
        decode_head(payload)


@pytest.mark.parametrize("cut", range(len(encode_state(STATE))))
def test_other_bytes_are_no_progress(cut: int) -> None:
    """Cut anywhere, or longer."""
    whole = encode_state(STATE)
    with pytest.raises(CorruptRecordError):
        decode_state(whole[:cut])
    with pytest.raises(CorruptRecordError):
        decode_state(whole + whole[: cut + 1])


@given(st.binary(max_size=120))
def test_any_bytes_are_read_or_refused(payload: bytes) -> None:
    """No other error leaves the module."""
    for decode in (decode_head, decode_state):
        try:
            decode(payload)
        except CorruptRecordError:
            continue


def test_a_high_count_of_tries_is_kept_as_the_highest() -> None:
    """It has no more bytes."""
    head = encode_head(1, MessageId(1), "t", 0, 1, tries=10**6)
    assert decode_head(head).tries == TRIES_MAX
