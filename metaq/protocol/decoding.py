"""Bytes to commands and replies.

`decode_line`, then `decode_frame` if there is a payload. A line is split at single
spaces; trailing empty tokens are dropped, leading and inner ones kept. The first *byte*
picks the decoder, which then compares the whole word; but any word with v (other than
`value`) is a version, and any with q is a quit. A frame is a line with its payload.
Before the payload of a put or sync has arrived, only its length is checked, so a wrong
number of tokens closes the connection only after the payload, as in MetaQ. A breach of
the rules raises `RemoteProtocolError`; no other error is raised.

Keep the table in README.md in step. Source: docs/metaq-1.4/broker.md 1.2 to 1.11, 11.1.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Final, NamedTuple, TypeAlias

from metaq.errors import RemoteProtocolError
from metaq.protocol.commands import (
    NO_CHECKSUM,
    NO_NEXT,
    NO_SEQUENCE,
    OPAQUE_MISSING,
    OWN_TIMES,
    Answer,
    Cancel,
    Check,
    Command,
    CommitTogether,
    CountQuestion,
    Find,
    Follow,
    Get,
    Listen,
    ListScheduled,
    Mput,
    OffsetQuery,
    Put,
    Question,
    Quit,
    Reply,
    Result,
    Settle,
    SplitQuestion,
    Stats,
    Sync,
    Take,
    TimeQuestion,
    TransactionCommand,
    TransactionType,
    Value,
    Version,
)
from metaq.protocol.decimals import (
    I32_MAX,
    I64_MAX,
    capped,
    parse_i32,
    parse_i64,
)
from metaq.protocol.escapes import unescape
from metaq.protocol.names import (
    MAILBOX,
    NO_PRODUCER,
    PRODUCER,
    TOGETHER,
    WORDS_REMEMBERED_MAX,
    parse_producer,
)
from metaq.protocol.transaction_ids import parse_key

Tokens: TypeAlias = list[bytes]

_WAIT: Final = b"wait="
_WORKER: Final = b"worker="
_GENERATION: Final = b"generation="
_TRANSACTION: Final = b"tx="
_DELIVER: Final = b"deliver="
_EACH: Final = b"each"
_WHERE: Final = b"where="
_ROUTE: Final = b"route="
_ROUTES: Final = {b"mandatory": True, b"optional": False}
_TYPES: Final = {kind.value.encode(): kind for kind in TransactionType}


@dataclass(slots=True)  # as `Result`
class Frame:
    """A line whose payload has not been read yet."""

    word: str
    """`put`, `sync`, `mput`, `settle`, `cancel`, `find`, `answer`, `transactions`,
    `follow`, `result` or `value`."""
    length: int
    """Number of payload bytes right after the line, 0 or more."""
    tokens: Tokens


def decode_line(line: bytes) -> Command | Frame:
    """Decode one line without its CRLF.

    Returns:
        A command without payload, or the frame that the line starts.

    Raises:
        RemoteProtocolError: the line breaks the rules.
    """
    tokens = line.rstrip(b" ").split(b" ")
    decoder = _DECODERS.get(tokens[0][:1])
    if decoder is None:
        raise _bad_line("unknown command", tokens)
    return decoder(tokens)


def decode_frame(frame: Frame, payload: bytes) -> Command | Reply:
    """Decode a frame with its complete payload.

    Raises:
        RemoteProtocolError: the line breaks the rules.
    """
    return _FRAMES[frame.word][2](frame.tokens, payload)


def _bad_line(problem: str, tokens: Tokens) -> RemoteProtocolError:
    line = b" ".join(tokens)
    return RemoteProtocolError(f"{problem}: {line[:80]!r}")


def _text(token: bytes) -> str:
    # As in Java: invalid UTF-8 is replaced; the topic check then refuses the name
    # without closing the connection.
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
    # Slot 5 of seven is a checksum if it starts like a number, else a key.
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
    count, sequence = parse_i32(tokens[4], "count"), parse_i64(tokens[7], "sequence")
    producer = None if tokens[6] == NO_PRODUCER else _text(tokens[6])
    if count < 0:
        raise _bad_line(f"count: expected 0 or more, got {count}", tokens)
    if producer is None and sequence != NO_SEQUENCE:
        raise _bad_line(f"sequence: expected -1, got {sequence}", tokens)
    if producer is not None and (sequence < 0 or not PRODUCER.fullmatch(producer)):
        raise _bad_line("producer and sequence do not fit", tokens)
    opaque, transaction, extra = tokens[8], None, tokens[9:]
    if opaque[:1].isalpha():
        _need(tokens, 10)
        opaque, transaction = tokens[9], parse_key(_text(opaque))
    deliver, deliver_ms = _extra(extra, _DELIVER), None
    if deliver == _EACH:
        deliver_ms = OWN_TIMES
    elif deliver is not None:
        if not deliver.isdigit():
            # If it were ignored, the batch would be appended at once.
            raise _bad_line("expected deliver=MILLISECONDS or deliver=each", tokens)
        deliver_ms = capped(deliver)
    route = _extra(extra, _ROUTE)
    if route is not None and route not in _ROUTES:
        raise _bad_line("expected route=mandatory or optional", tokens)
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
        deliver_ms=deliver_ms,
        is_mandatory=None if route is None else _ROUTES[route],
    )


def _decode_together(tokens: Tokens, payload: bytes) -> CommitTogether:
    count = parse_i32(tokens[3], "count")
    if tokens[2] != TOGETHER or count < 1:
        raise _bad_line("expected COMMITTOGETHER and 1 or more keys", tokens)
    opaque = parse_i32(tokens[5], "opaque")
    return CommitTogether(_text(tokens[1]), count, opaque, payload)


def _decode_follow(tokens: Tokens, payload: bytes) -> Follow:
    return Follow(_text(tokens[1]), payload, parse_i32(tokens[3], "opaque"))


def _decode_result(tokens: Tokens, payload: bytes) -> Result:
    status = parse_i32(tokens[1], "status")
    return Result(status, payload, parse_i32(tokens[3], "opaque"))


def _decode_value(tokens: Tokens, payload: bytes) -> Value:
    opaque = parse_i32(tokens[2], "opaque")
    if len(tokens) == 3:
        return Value(payload, opaque)
    after = _number(tokens[3:], b"next=", NO_NEXT)
    return Value(payload, opaque, after, _number(tokens[3:], b"read=", 0))


def _decode_settle(tokens: Tokens, payload: bytes) -> Settle:
    count = parse_i32(tokens[4], "count")
    if count < 1:
        raise _bad_line(f"count: expected 1 or more, got {count}", tokens)
    extra = tuple(tokens[7:])
    key, asked = _extra(extra, _TRANSACTION), _worker_words(extra)
    return Settle(
        topic=_text(tokens[1]),
        group=_text(tokens[2]),
        partition=parse_i32(tokens[3], "partition"),
        count=count,
        payload=payload,
        opaque=parse_i32(tokens[6], "opaque"),
        worker=_named(asked.worker, tokens),
        transaction=None if key is None else parse_key(_text(key)),
        generation=asked.generation,
    )


def _decode_cancel(tokens: Tokens, payload: bytes) -> Cancel:
    return Cancel(_text(tokens[1]), payload, parse_i32(tokens[3], "opaque"))


def _decode_find(tokens: Tokens, payload: bytes) -> Find:
    extra = tokens[5:]
    first, *others = (parse_i32(one, "partition") for one in tokens[2].split(b","))
    return Find(
        topic=_text(tokens[1]),
        partition=first,
        payload=payload,
        opaque=parse_i32(tokens[4], "opaque"),
        limit=min(_number(extra, b"limit=", 1), I32_MAX),
        below=_number(extra, b"below=", I64_MAX),
        since_ms=_number(extra, b"since=", 0),
        until_ms=_number(extra, b"until=", I64_MAX),
        others=tuple(others),
    )


def _decode_answer(tokens: Tokens, payload: bytes) -> Answer:
    digits = tokens[2]
    if not digits.isdigit():
        raise _bad_line("expected a correlation of 0 or more", tokens)
    opaque = parse_i32(tokens[4], "opaque")
    return Answer(_mailbox(tokens), parse_i64(digits, "correlation"), payload, opaque)


def _mailbox(tokens: Tokens) -> str:
    name = _text(tokens[1])
    if not MAILBOX.fullmatch(name):
        raise _bad_line("expected a mailbox of 32 hexadecimal digits", tokens)
    return name


# -- lines that are whole commands ----------------------------------------------------


def _decode_get(tokens: Tokens) -> Get:
    if tokens[0] != b"get":
        raise _bad_line("unknown command", tokens)
    _need(tokens, 7)
    where = _extra(tokens[7:], _WHERE)
    return Get(
        topic=_text(tokens[1]),
        group=_text(tokens[2]),
        partition=parse_i32(tokens[3], "partition"),
        offset=parse_i64(tokens[4], "offset"),
        max_size=parse_i32(tokens[5], "max size"),
        opaque=parse_i32(tokens[6], "opaque"),
        wait_ms=_wait_ms(tokens[7:]),
        where=None if where is None else unescape(where, "where"),
    )


def _wait_ms(extra: Sequence[bytes]) -> int:
    """Return the first valid wait, in ms; extra tokens are ignored, as in MetaQ."""
    for token in extra:
        number = token.removeprefix(_WAIT)
        if token.startswith(_WAIT) and number.isdigit():
            # Ten digits are enough to reach the cap, and keep int() cheap.
            return I32_MAX if len(number) > 10 else min(int(number), I32_MAX)
    return 0


def _extra(extra: Sequence[bytes], name: bytes) -> bytes | None:
    """Return the value of the first extra token of that name; None if absent."""
    for token in extra:
        if token.startswith(name):
            return token[len(name) :]
    return None


def _number(extra: Sequence[bytes], name: bytes, otherwise: int) -> int:
    digits = _extra(extra, name)
    return capped(digits) if digits is not None and digits.isdigit() else otherwise


class _WorkerWords(NamedTuple):
    """Extra tokens in the takes and settles of a worker."""

    worker: str | None
    """Its name; None if it is missing or invalid."""
    lease_ms: int
    wait_ms: int
    generation: int | None


# Cached, because nearly all commands of a worker have the same extra tokens.
@lru_cache(WORDS_REMEMBERED_MAX)
def _worker_words(extra: tuple[bytes, ...]) -> _WorkerWords:
    word = _extra(extra, _GENERATION)
    return _WorkerWords(
        parse_producer(_extra(extra, _WORKER) or b""),
        min(_number(extra, b"lease=", 0), I32_MAX),
        _wait_ms(extra),
        capped(word) if word is not None and word.isdigit() else None,
    )


def _named(worker: str | None, tokens: Tokens) -> str:
    if worker is None:
        raise _bad_line("expected worker=NAME", tokens)
    return worker


def _decode_take(tokens: Tokens) -> Take:
    _need(tokens, 7)
    asked = _worker_words(tuple(tokens[7:]))
    return Take(
        topic=_text(tokens[1]),
        group=_text(tokens[2]),
        partition=parse_i32(tokens[3], "partition"),
        count=parse_i32(tokens[4], "count"),
        max_size=parse_i32(tokens[5], "max size"),
        opaque=parse_i32(tokens[6], "opaque"),
        worker=_named(asked.worker, tokens),
        lease_ms=asked.lease_ms,
        wait_ms=asked.wait_ms,
        generation=asked.generation,
    )


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
        question=_decode_question(tokens[6:]),
    )


def _decode_question(extra: Tokens) -> Question | None:
    """Return the first valid question; other extra tokens are ignored."""
    for token in extra:
        word, _equals, value = token.partition(b"=")
        numbers = value.split(b",")
        if not all(map(bytes.isdigit, numbers)):
            continue
        match word, list(map(capped, numbers)):
            case b"time", [time_ms]:
                return TimeQuestion(time_ms)
            case b"count", [end]:
                return CountQuestion(end)
            case b"boundaries", [end, count_max]:
                return SplitQuestion(end, min(count_max, I32_MAX))
    return None


def _decode_listen(tokens: Tokens) -> Listen:
    _need(tokens, 3)
    if tokens[0] != b"listen":
        raise _bad_line("unknown command", tokens)
    opaque = parse_i32(tokens[2], "opaque")
    return Listen(_mailbox(tokens), opaque, _wait_ms(tokens[3:]))


def _decode_c(tokens: Tokens) -> Command | Frame:
    return _decode_check(tokens) if tokens[0] == b"check" else _decode_opening(tokens)


def _decode_check(tokens: Tokens) -> Check:
    _need(tokens, 6)
    return Check(
        topic=_text(tokens[1]),
        partition=parse_i32(tokens[2], "partition"),
        offset=parse_i64(tokens[3], "offset"),
        size=parse_i32(tokens[4], "size"),
        opaque=parse_i32(tokens[5], "opaque"),
    )


def _decode_v(tokens: Tokens) -> Command | Frame:
    if tokens[0] == b"value":
        return _decode_opening(tokens)
    has_opaque = len(tokens) > 1
    return Version(parse_i32(tokens[1], "opaque") if has_opaque else OPAQUE_MISSING)


def _decode_scheduled(tokens: Tokens) -> ListScheduled:
    _need(tokens, 4)
    limit = parse_i32(tokens[2], "limit")
    if limit < 0:
        raise _bad_line(f"limit: expected 0 or more, got {limit}", tokens)
    return ListScheduled(
        topic=_text(tokens[1]),
        limit=limit,
        opaque=parse_i32(tokens[3], "opaque"),
        from_ms=_number(tokens[4:], b"from=", 0),
        to_ms=_number(tokens[4:], b"to=", I64_MAX),
    )


def _decode_s(tokens: Tokens) -> Command | Frame:
    if tokens[0] == b"scheduled":
        return _decode_scheduled(tokens)
    if tokens[0] != b"stats":
        return _decode_opening(tokens)
    # A single token after the word is the item, even when it is a number.
    item = _text(tokens[1]) if len(tokens) > 1 else ""
    has_opaque = len(tokens) > 2
    return Stats(item, parse_i32(tokens[2], "opaque") if has_opaque else OPAQUE_MISSING)


def _decode_q(_tokens: Tokens) -> Quit:
    return Quit()


def _decode_t(tokens: Tokens) -> Command | Frame:
    return _decode_take(tokens) if tokens[0] == b"take" else _decode_transaction(tokens)


def _decode_transaction(tokens: Tokens) -> TransactionCommand | Frame:
    count = len(tokens)
    if tokens[0] != b"transaction":
        return _decode_opening(tokens)
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
    b"a": _decode_opening,
    b"p": _decode_opening,
    b"m": _decode_opening,
    b"f": _decode_opening,
    b"r": _decode_opening,
    b"s": _decode_s,
    b"v": _decode_v,
    b"g": _decode_get,
    b"l": _decode_listen,
    b"o": _decode_offset,
    b"c": _decode_c,
    b"t": _decode_t,
    b"q": _decode_q,
}

# Index of the length token, minimum number of tokens before the payload is awaited, and
# the decoder of tokens and payload.
_FRAMES: Final[
    dict[str, tuple[int, int, Callable[[Tokens, bytes], Command | Reply]]]
] = {
    "put": (3, 4, _decode_put),
    "sync": (3, 4, _decode_sync),
    "mput": (3, 9, _decode_mput),
    "settle": (5, 7, _decode_settle),
    "cancel": (2, 4, _decode_cancel),
    "find": (3, 5, _decode_find),
    "answer": (3, 5, _decode_answer),
    "transactions": (4, 6, _decode_together),
    "follow": (2, 4, _decode_follow),
    "result": (2, 4, _decode_result),
    "value": (1, 3, _decode_value),
}
