"""Command lines to values: `decode_line`, then `decode_frame` when there is a payload.

A line is split on single spaces; trailing empty tokens are dropped, leading and inner
ones kept. The first *byte* picks the decoder, which then compares the whole word,
except that any word with v (other than `value`) is a version, and any with q a quit.
A frame is a line with its payload: of a put or sync only the length is looked at before
the payload is there, so a wrong count of tokens closes the connection only then, as
MetaQ does. A breach of the rules raises `RemoteProtocolError`, and no other error is
raised. Keep the table in README.md in step.
Source: broker spec 1.2 to 1.11.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, TypeAlias

from metaq.errors import RemoteProtocolError
from metaq.protocol.commands import (
    NO_CHECKSUM,
    NO_SEQUENCE,
    OPAQUE_MISSING,
    Command,
    CountQuestion,
    Get,
    Mput,
    OffsetQuery,
    Put,
    Question,
    Quit,
    Reply,
    Result,
    SplitQuestion,
    Stats,
    Sync,
    TimeQuestion,
    TransactionCommand,
    TransactionType,
    Value,
    Version,
)
from metaq.protocol.java import I32_MAX, I64_MAX, parse_i32, parse_i64
from metaq.protocol.transaction_ids import parse_key

Tokens: TypeAlias = list[bytes]

PRODUCER: Final = re.compile(r"[A-Za-z0-9._~-]{1,64}")
"""A producer's name in an `mput`; a lone '-' says that there is none."""

_NO_PRODUCER: Final = b"-"
_WAIT: Final = b"wait="
_DIGITS_MAX: Final = 19
"""Digits of the largest 64-bit number."""
_TYPES: Final = {kind.value.encode(): kind for kind in TransactionType}


@dataclass(frozen=True, slots=True)
class Frame:
    """A line whose payload is still to come."""

    word: str
    """`put`, `sync`, `mput`, `result` or `value`."""
    length: int
    """Bytes of payload right behind the line, 0 or more."""
    tokens: Tokens
    """All tokens of the line, the word included."""


def decode_line(line: bytes) -> Command | Frame:
    """Decode one line without its CRLF.

    Returns:
        A command without payload, or the frame that the line opens.

    Raises:
        RemoteProtocolError: the line breaks the rules.
    """
    tokens = line.rstrip(b" ").split(b" ")
    decoder = _DECODERS.get(tokens[0][:1])
    if decoder is None:
        raise _bad_line("unknown command", tokens)
    return decoder(tokens)


def decode_frame(frame: Frame, payload: bytes) -> Command | Reply:
    """Decode the frame `frame` with its whole payload.

    Raises:
        RemoteProtocolError: the line breaks the rules.
    """
    return _FRAMES[frame.word][2](frame.tokens, payload)


def _bad_line(problem: str, tokens: Tokens) -> RemoteProtocolError:
    line = b" ".join(tokens)
    return RemoteProtocolError(f"{problem}: {line[:80]!r}")


def _text(token: bytes) -> str:
    # Java replaces invalid UTF-8; the topic check then refuses the name aloud,
    # and the frame stays in step, which is kinder than a closed connection.
    return token.decode(errors="replace")


def _need(tokens: Tokens, count: int) -> None:
    if len(tokens) < count:
        raise _bad_line(f"expected {count} tokens, got {len(tokens)}", tokens)


# -- lines that open a frame ----------------------------------------------------------


def _decode_opening(tokens: Tokens) -> Frame:
    word = tokens[0].decode(errors="replace")
    if word not in _FRAMES:
        raise _bad_line("unknown command", tokens)
    slot, count_min, _decode = _FRAMES[word]
    _need(tokens, count_min)
    length = parse_i32(tokens[slot], "length")
    if length < 0:
        raise _bad_line(f"length: expected 0..{I32_MAX}, got {length}", tokens)
    return Frame(word, length, tokens)


def _decode_put(tokens: Tokens, payload: bytes) -> Put:
    count = len(tokens)
    if not 6 <= count <= 8:
        raise _bad_line(f"expected 6 to 8 tokens, got {count}", tokens)
    # Slot 5 of seven is a checksum when it starts like a number, else a key.
    has_checksum = count == 8 or (count == 7 and _starts_like_number(tokens[5]))
    key = None
    if count == 8 or (count == 7 and not has_checksum):
        key = parse_key(_text(tokens[-2]))
    return Put(
        topic=_text(tokens[1]),
        partition=parse_i32(tokens[2], "partition"),
        payload=payload,
        flag=parse_i32(tokens[4], "flag"),
        checksum=parse_i32(tokens[5], "checksum") if has_checksum else NO_CHECKSUM,
        opaque=parse_i32(tokens[-1], "opaque"),
        transaction=key,
    )


def _starts_like_number(token: bytes) -> bool:
    return token[:1] == b"-" or token[:1].isdigit()


def _decode_sync(tokens: Tokens, payload: bytes) -> Sync:
    count = len(tokens)
    if not 7 <= count <= 8:
        raise _bad_line(f"expected 7 or 8 tokens, got {count}", tokens)
    return Sync(
        topic=_text(tokens[1]),
        partition=parse_i32(tokens[2], "partition"),
        payload=payload,
        flag=parse_i32(tokens[4], "flag"),
        message_id=parse_i64(tokens[5], "message id"),
        checksum=parse_i32(tokens[6], "checksum") if count == 8 else NO_CHECKSUM,
        opaque=parse_i32(tokens[-1], "opaque"),
    )


def _decode_mput(tokens: Tokens, payload: bytes) -> Mput:
    count = parse_i32(tokens[4], "count")
    sequence = parse_i64(tokens[7], "sequence")
    producer = None if tokens[6] == _NO_PRODUCER else _text(tokens[6])
    if count < 0:
        raise _bad_line(f"count: expected 0 or more, got {count}", tokens)
    if producer is None and sequence != NO_SEQUENCE:
        raise _bad_line(f"sequence: expected -1, got {sequence}", tokens)
    if producer is not None and (sequence < 0 or not PRODUCER.fullmatch(producer)):
        raise _bad_line("producer and sequence do not fit", tokens)
    opaque, transaction = tokens[8], None
    if opaque[:1].isalpha():
        _need(tokens, 10)
        opaque, transaction = tokens[9], parse_key(_text(opaque))
    if producer is not None and transaction is not None:
        raise _bad_line("a batch of a transaction has no producer", tokens)
    return Mput(
        topic=_text(tokens[1]),
        partition=parse_i32(tokens[2], "partition"),
        count=count,
        checksum=parse_i32(tokens[5], "checksum"),
        opaque=parse_i32(opaque, "opaque"),
        payload=payload,
        producer=producer,
        sequence=sequence,
        transaction=transaction,
    )


def _decode_result(tokens: Tokens, payload: bytes) -> Result:
    status = parse_i32(tokens[1], "status")
    return Result(status, payload, parse_i32(tokens[3], "opaque"))


def _decode_value(tokens: Tokens, payload: bytes) -> Value:
    return Value(payload, parse_i32(tokens[2], "opaque"))


# -- lines that are whole commands ----------------------------------------------------


def _decode_get(tokens: Tokens) -> Get:
    if tokens[0] != b"get":
        raise _bad_line("unknown command", tokens)
    _need(tokens, 7)
    return Get(
        topic=_text(tokens[1]),
        group=_text(tokens[2]),
        partition=parse_i32(tokens[3], "partition"),
        offset=parse_i64(tokens[4], "offset"),
        max_size=parse_i32(tokens[5], "max size"),
        opaque=parse_i32(tokens[6], "opaque"),
        wait_ms=_wait_ms(tokens[7:]),
    )


def _wait_ms(extra: Tokens) -> int:
    """Return the first wait that makes sense; MetaQ ignores extra tokens, so do we."""
    for token in extra:
        number = token.removeprefix(_WAIT)
        if token.startswith(_WAIT) and number.isdigit():
            # Ten digits are enough to reach the cap, and keep int() cheap.
            return I32_MAX if len(number) > 10 else min(int(number), I32_MAX)
    return 0


def _decode_offset(tokens: Tokens) -> OffsetQuery:
    if tokens[0] != b"offset":
        raise _bad_line("unknown command", tokens)
    _need(tokens, 6)
    return OffsetQuery(
        topic=_text(tokens[1]),
        group=_text(tokens[2]),
        partition=parse_i32(tokens[3], "partition"),
        offset=parse_i64(tokens[4], "offset"),
        opaque=parse_i32(tokens[5], "opaque"),
        question=_question(tokens[6:]),
    )


def _question(extra: Tokens) -> Question | None:
    """Return the first question that makes sense; other extra tokens are ignored."""
    for token in extra:
        word, _equals, value = token.partition(b"=")
        numbers = value.split(b",")
        if not all(map(bytes.isdigit, numbers)):
            continue
        match word, list(map(_capped, numbers)):
            case b"time", [time_ms]:
                return TimeQuestion(time_ms)
            case b"count", [end]:
                return CountQuestion(end)
            case b"boundaries", [end, count_max]:
                return SplitQuestion(end, min(count_max, I32_MAX))
    return None


def _capped(digits: bytes) -> int:
    """Return a number, or the largest one of 64 bits where it is larger."""
    # Nineteen digits are enough to reach the cap, and keep int() cheap.
    return I64_MAX if len(digits) > _DIGITS_MAX else min(int(digits), I64_MAX)


def _decode_v(tokens: Tokens) -> Command | Frame:
    if tokens[0] == b"value":
        return _decode_opening(tokens)
    has_opaque = len(tokens) > 1
    return Version(parse_i32(tokens[1], "opaque") if has_opaque else OPAQUE_MISSING)


def _decode_s(tokens: Tokens) -> Command | Frame:
    if tokens[0] != b"stats":
        return _decode_opening(tokens)
    # A single token behind the word is the item, even when it is a number.
    item = _text(tokens[1]) if len(tokens) > 1 else ""
    has_opaque = len(tokens) > 2
    return Stats(item, parse_i32(tokens[2], "opaque") if has_opaque else OPAQUE_MISSING)


def _decode_q(_tokens: Tokens) -> Quit:
    return Quit()


def _decode_transaction(tokens: Tokens) -> TransactionCommand:
    count = len(tokens)
    if tokens[0] != b"transaction":
        raise _bad_line("unknown command", tokens)
    if not 5 <= count <= 7:
        raise _bad_line(f"expected 5 to 7 tokens, got {count}", tokens)
    kind = _TYPES.get(tokens[3])
    if kind is None:
        raise _bad_line("unknown transaction type", tokens)
    timeout, qualifier = b"0", None
    if count == 7:
        timeout, qualifier = tokens[4], tokens[5]
    elif count == 6 and tokens[4].isdigit():
        timeout = tokens[4]
    elif count == 6:
        qualifier = tokens[4]
    return TransactionCommand(
        transaction=parse_key(_text(tokens[1])),
        session_id=_text(tokens[2]),
        type=kind,
        opaque=parse_i32(tokens[-1], "opaque"),
        timeout_s=parse_i32(timeout, "timeout"),
        qualifier=None if qualifier is None else _text(qualifier),
    )


_DECODERS: Final[dict[bytes, Callable[[Tokens], Command | Frame]]] = {
    b"p": _decode_opening,
    b"m": _decode_opening,
    b"r": _decode_opening,
    b"s": _decode_s,
    b"v": _decode_v,
    b"g": _decode_get,
    b"o": _decode_offset,
    b"t": _decode_transaction,
    b"q": _decode_q,
}

# # The slot of the length token, the number of tokens without which waiting for the
# payload is useless, and the maker of a value from tokens and payload.
_FRAMES: Final[
    dict[str, tuple[int, int, Callable[[Tokens, bytes], Command | Reply]]]
] = {
    "put": (3, 4, _decode_put),
    "sync": (3, 4, _decode_sync),
    "mput": (3, 9, _decode_mput),
    "result": (2, 4, _decode_result),
    "value": (1, 3, _decode_value),
}
