"""Commands and replies to bytes, and bytes to commands and replies.

Reading: `decode_line`, then `decode_frame` when there is a payload. A line is split on
single spaces; trailing empty tokens are dropped, leading and inner ones kept. The first
*byte* picks the decoder, which then compares the whole word, except that any word with
v (other than `value`) is a version, and any with q a quit. A frame is a line with its
payload: of a put or sync only the length is looked at before the payload is there, so a
wrong count of tokens closes the connection only then, as MetaQ does. A breach of the
rules raises `RemoteProtocolError`, and no other error is raised.

Writing: `encode` gives the forms that MetaQ's own Java clients and brokers write. It
checks its argument and raises `LocalProtocolError` where the peer would read something
else: what it accepts is decoded to the same value.

Keep the table in README.md in step. Source: docs/metaq-1.4/broker.md 1.2 to 1.11, 11.1.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Final, TypeAlias, assert_never

from metaq.errors import LocalProtocolError, RemoteProtocolError
from metaq.model import TransactionId
from metaq.protocol.commands import (
    NO_CHECKSUM,
    NO_NEXT,
    NO_SEQUENCE,
    OPAQUE_MISSING,
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
    I32_MIN,
    I64_MAX,
    I64_MIN,
    capped,
    parse_i32,
    parse_i64,
)
from metaq.protocol.escapes import escape, unescape
from metaq.protocol.transaction_ids import format_key, parse_key

Tokens: TypeAlias = list[bytes]

QUIT: Final = b"quit\r\n"

PRODUCER: Final = re.compile(r"[A-Za-z0-9._~-]{1,64}")
"""A producer's name in an `mput`; a single '-' is none."""

MAILBOX: Final = re.compile(r"[0-9a-f]{32}")
"""A mailbox in a `listen` or `answer`."""

WORDS_REMEMBERED_MAX: Final = 1024
"""Partitions, and producers, whose words in an `mput` are remembered."""

_NO_PRODUCER: Final = b"-"
_TOGETHER: Final = b"COMMIT_TOGETHER"
_WAIT: Final = b"wait="
_WORKER: Final = b"worker="
_GENERATION: Final = b"generation="
_TRANSACTION: Final = b"tx="
_DELIVER: Final = b"deliver="
_WHERE: Final = b"where="
_ROUTE: Final = b"route="
_ROUTES: Final = {b"mandatory": True, b"optional": False}
_TYPES: Final = {kind.value.encode(): kind for kind in TransactionType}


@dataclass(frozen=True, slots=True)
class Frame:
    """A line whose payload is still to come."""

    word: str
    """`put`, `sync`, `mput`, `settle`, `cancel`, `find`, `answer`, `transactions`,
    `follow`, `result` or `value`."""
    length: int
    """Bytes of payload right after the line, 0 or more."""
    tokens: Tokens


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
    # As Java: invalid UTF-8 is replaced, and the topic check then refuses the name
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
    count, sequence = parse_i32(tokens[4], "count"), parse_i64(tokens[7], "sequence")
    producer = None if tokens[6] == _NO_PRODUCER else _text(tokens[6])
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
    deliver = _extra(extra, _DELIVER)
    if deliver is not None and not deliver.isdigit():
        # Ignored, it would be there at once.
        raise _bad_line("expected deliver=MILLISECONDS", tokens)
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
        deliver_ms=None if deliver is None else capped(deliver),
        is_mandatory=None if route is None else _ROUTES[route],
    )


def _decode_together(tokens: Tokens, payload: bytes) -> CommitTogether:
    count = parse_i32(tokens[3], "count")
    if tokens[2] != _TOGETHER or count < 1:
        raise _bad_line("expected COMMIT_TOGETHER and 1 or more keys", tokens)
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
    key = _extra(tokens[7:], _TRANSACTION)
    return Settle(
        topic=_text(tokens[1]),
        group=_text(tokens[2]),
        partition=parse_i32(tokens[3], "partition"),
        count=count,
        payload=payload,
        opaque=parse_i32(tokens[6], "opaque"),
        worker=_worker(tokens[7:], tokens),
        transaction=None if key is None else parse_key(_text(key)),
        generation=_generation(tokens[7:]),
    )


def _decode_cancel(tokens: Tokens, payload: bytes) -> Cancel:
    return Cancel(_text(tokens[1]), payload, parse_i32(tokens[3], "opaque"))


def _decode_find(tokens: Tokens, payload: bytes) -> Find:
    extra = tokens[5:]
    return Find(
        topic=_text(tokens[1]),
        partition=parse_i32(tokens[2], "partition"),
        payload=payload,
        opaque=parse_i32(tokens[4], "opaque"),
        limit=min(_number(extra, b"limit=", 1), I32_MAX),
        below=_number(extra, b"below=", I64_MAX),
        since_ms=_number(extra, b"since=", 0),
        until_ms=_number(extra, b"until=", I64_MAX),
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


def _wait_ms(extra: Tokens) -> int:
    """Return the first valid wait; extra tokens are ignored, as in MetaQ."""
    for token in extra:
        number = token.removeprefix(_WAIT)
        if token.startswith(_WAIT) and number.isdigit():
            # Ten digits are enough to reach the cap, and keep int() cheap.
            return I32_MAX if len(number) > 10 else min(int(number), I32_MAX)
    return 0


def _extra(extra: Tokens, name: bytes) -> bytes | None:
    """Return the value of the first extra token of that name; None without one."""
    for token in extra:
        if token.startswith(name):
            return token[len(name) :]
    return None


def _number(extra: Tokens, name: bytes, otherwise: int) -> int:
    digits = _extra(extra, name)
    return capped(digits) if digits is not None and digits.isdigit() else otherwise


def _worker(extra: Tokens, tokens: Tokens) -> str:
    word = _extra(extra, _WORKER) or b""
    name = parse_producer(word)
    if name is None:
        raise _bad_line("expected worker=NAME", tokens)
    return name


def _decode_take(tokens: Tokens) -> Take:
    _need(tokens, 7)
    return Take(
        topic=_text(tokens[1]),
        group=_text(tokens[2]),
        partition=parse_i32(tokens[3], "partition"),
        count=parse_i32(tokens[4], "count"),
        max_size=parse_i32(tokens[5], "max size"),
        opaque=parse_i32(tokens[6], "opaque"),
        worker=_worker(tokens[7:], tokens),
        lease_ms=min(_number(tokens[7:], b"lease=", 0), I32_MAX),
        wait_ms=_wait_ms(tokens[7:]),
        generation=_generation(tokens[7:]),
    )


def _generation(extra: Tokens) -> int | None:
    word = _extra(extra, _GENERATION)
    return capped(word) if word is not None and word.isdigit() else None


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

# Index of the length token, least number of tokens before the payload is awaited, and
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


# -- values to bytes ------------------------------------------------------------------


def encode(event: Command | Reply) -> bytes:
    """Return the bytes of a command or reply, payload included.

    Raises:
        LocalProtocolError: a name has a space or line end or is empty, or a number
            does not fit its field.
    """
    match event:
        case Put():
            return _encode_put(event)
        case Mput():
            return _encode_mput(event)
        case Get():
            tokens = ["get", event.topic, event.group, _i32(event.partition)]
            tokens += [_i64(event.offset), _i32(event.max_size), _i32(event.opaque)]
            if event.wait_ms:
                tokens.append(f"wait={_in_range(event.wait_ms, 0, I32_MAX)}")
            if event.where is not None:
                tokens.append(f"where={escape(event.where)}")
            return _line(tokens)
        case OffsetQuery():
            tokens = ["offset", event.topic, event.group, _i32(event.partition)]
            tokens += [_i64(event.offset), _i32(event.opaque)]
            if event.question is not None:
                tokens.append(_encode_question(event.question))
            return _line(tokens)
        case Check():
            tokens = ["check", event.topic, _i32(event.partition), _i64(event.offset)]
            return _line([*tokens, _i32(event.size), _i32(event.opaque)])
        case Take():
            return _encode_take(event)
        case Settle():
            tokens = ["settle", event.topic, event.group, _i32(event.partition)]
            tokens += [str(_in_range(event.count, 1, I32_MAX)), _length(event.payload)]
            tokens += [_i32(event.opaque), *_worker_words(event)]
            if event.transaction is not None:
                tokens.append(f"tx={_key(event.transaction)}")
            return _line(tokens) + event.payload
        case Cancel():
            tokens = ["cancel", event.topic, _length(event.payload)]
            return _line([*tokens, _i32(event.opaque)]) + event.payload
        case Find():
            return _encode_find(event)
        case ListScheduled():
            return _encode_scheduled(event)
        case Listen():
            tokens = ["listen", _mailbox_word(event.mailbox), _i32(event.opaque)]
            if event.wait_ms:
                tokens.append(f"wait={_in_range(event.wait_ms, 0, I32_MAX)}")
            return _line(tokens)
        case Answer():
            tokens = ["answer", _mailbox_word(event.mailbox)]
            tokens += [str(_in_range(event.correlation, 0, I64_MAX))]
            tokens += [_length(event.payload), _i32(event.opaque)]
            return _line(tokens) + event.payload
        case Version():
            return _line(["version", _i32(event.opaque)])
        case Stats():
            return _encode_stats(event)
        case Quit():
            return QUIT
        case TransactionCommand():
            return _encode_transaction(event)
        case CommitTogether():
            tokens = ["transactions", event.session_id, _TOGETHER.decode()]
            tokens += [str(_in_range(event.count, 1, I32_MAX)), _length(event.payload)]
            return _line([*tokens, _i32(event.opaque)]) + event.payload
        case Sync():
            tokens = ["sync", event.topic, _i32(event.partition)]
            tokens += [_length(event.payload), _i32(event.flag)]
            tokens += [_i64(event.message_id), _i32(event.checksum)]
            return _line([*tokens, _i32(event.opaque)]) + event.payload
        case Follow():
            tokens = ["follow", event.kind, _length(event.payload)]
            return _line([*tokens, _i32(event.opaque)]) + event.payload
        case Result():
            return encode_result(event.status, event.body, event.opaque)
        case Value():
            line = encode_value_line(
                len(event.payload), event.opaque, event.next_offset, event.read_bytes
            )
            return line + event.payload
        case _:  # pragma: no cover
            assert_never(event)


def encode_puts(
    topic: str,
    partition: int,
    payloads: Sequence[bytes],
    *,
    flags: Sequence[int] | None,
    checksums: Sequence[int],
    opaques: range,
    transaction: TransactionId | None = None,
) -> bytes:
    """Return puts to one partition, back to back, as `encode` writes each.

    All are made in one operation; one operation per put would cost ten times as much.

    Args:
        topic: of all of them.
        partition: of all of them.
        payloads: at least one.
        flags: of each put; None when all are 0.
        checksums: of each payload.
        opaques: of each put.
        transaction: that all of them belong to; None appends each at once.

    Raises:
        LocalProtocolError: as `encode`.
    """
    head = _words(["put", topic, _i32(partition)])
    count = len(payloads)
    values: list[int | bytes] = [0] * (5 * count)
    values[0::5] = sizes = list(map(len, payloads))
    if flags is not None:
        values[1::5] = flags
    values[2::5], values[3::5], values[4::5] = checksums, opaques, payloads
    for numbers in (sizes, flags or (0,), checksums, opaques):
        _in_range(min(numbers), I32_MIN, I32_MAX)
        _in_range(max(numbers), I32_MIN, I32_MAX)
    key = b""
    if transaction is not None:
        key = b" " + _words([_key(transaction)])
    head, key = head.replace(b"%", b"%%"), key.replace(b"%", b"%%")
    put = b"%b %%d %%d %%d%b %%d\r\n%%b" % (head, key)
    return put * count % tuple(values)


def encode_result(status: int, body: bytes, opaque: int) -> bytes:
    """Return the bytes of a `result`; an empty body has length 0."""
    return b"result %d %d %d\r\n%b" % (status, len(body), opaque, body)


def encode_value_line(
    length: int, opaque: int, next_offset: int = NO_NEXT, read_bytes: int = 0
) -> bytes:
    """Return the line of a `value` whose `length` bytes the caller sends itself."""
    after = b"" if next_offset == NO_NEXT else b" next=%d" % next_offset
    read = b" read=%d" % read_bytes if read_bytes else b""
    return b"value %d %d%b%b\r\n" % (length, opaque, after, read)


def _encode_question(question: Question) -> str:
    match question:
        case TimeQuestion():
            return f"time={_in_range(question.time_ms, 0, I64_MAX)}"
        case CountQuestion():
            return f"count={_in_range(question.end, 0, I64_MAX)}"
        case SplitQuestion():
            end = _in_range(question.end, 0, I64_MAX)
            return f"boundaries={end},{_in_range(question.count_max, 0, I32_MAX)}"
        case _:  # pragma: no cover
            assert_never(question)


def _encode_put(put: Put) -> bytes:
    tokens = ["put", put.topic, _i32(put.partition), _length(put.payload)]
    tokens += [_i32(put.flag), _i32(put.checksum)]
    if put.transaction is not None:
        tokens.append(_key(put.transaction))
    return _line([*tokens, _i32(put.opaque)]) + put.payload


def _encode_mput(mput: Mput) -> bytes:
    if mput.producer is None:
        _in_range(mput.sequence, NO_SEQUENCE, NO_SEQUENCE)
    else:
        _in_range(mput.sequence, 0, I64_MAX)
    key = b""
    if mput.transaction is not None:
        if mput.producer is not None:
            raise LocalProtocolError("a batch of a transaction has no producer")
        key = _words([_key(mput.transaction)]) + b" "
    extra = b""
    if mput.deliver_ms is not None:
        extra = b" deliver=%d" % _in_range(mput.deliver_ms, 0, I64_MAX)
    if mput.is_mandatory is not None:
        extra += b" route=mandatory" if mput.is_mandatory else b" route=optional"
    line = b"%b %d %d %d %b %d %b%d%b\r\n" % (
        _mput_words(mput.topic, mput.partition),
        _in_range(len(mput.payload), 0, I32_MAX),
        _in_range(mput.count, 0, I32_MAX),
        _in_range(mput.checksum, I32_MIN, I32_MAX),
        _producer_word(mput.producer),
        mput.sequence,
        key,
        _in_range(mput.opaque, I32_MIN, I32_MAX),
        extra,
    )
    return line + mput.payload


def parse_producer(word: bytes) -> str | None:
    """Return the name of a producer in an `mput`; None where the word is none."""
    name = word.decode("latin-1")
    return name if word != _NO_PRODUCER and PRODUCER.fullmatch(name) else None


# Nearly all batches of a client are of one producer, to few partitions.
@lru_cache(WORDS_REMEMBERED_MAX)
def _mput_words(topic: str, partition: int) -> bytes:
    return _words(["mput", topic, _i32(partition)])


@lru_cache(WORDS_REMEMBERED_MAX)
def _producer_word(producer: str | None) -> bytes:
    if producer is None:
        return _NO_PRODUCER
    if producer == "-" or not PRODUCER.fullmatch(producer):
        raise LocalProtocolError(f"producer: {producer!r} is not a name")
    return producer.encode()


def _worker_words(command: Take | Settle) -> list[str]:
    words = [f"worker={_producer_word(command.worker).decode()}"]
    if command.generation is not None:
        words.append(f"generation={_in_range(command.generation, 0, I64_MAX)}")
    return words


def _mailbox_word(mailbox: str) -> str:
    if not MAILBOX.fullmatch(mailbox):
        raise LocalProtocolError(f"mailbox: {mailbox!r} is not a name")
    return mailbox


def _encode_take(take: Take) -> bytes:
    tokens = ["take", take.topic, take.group, _i32(take.partition)]
    tokens += [_i32(take.count), _i32(take.max_size), _i32(take.opaque)]
    if take.lease_ms:
        tokens.append(f"lease={_in_range(take.lease_ms, 1, I32_MAX)}")
    tokens += _worker_words(take)
    if take.wait_ms:
        tokens.append(f"wait={_in_range(take.wait_ms, 0, I32_MAX)}")
    return _line(tokens)


def _encode_find(find: Find) -> bytes:
    tokens = ["find", find.topic, _i32(find.partition), _length(find.payload)]
    tokens += [_i32(find.opaque), f"limit={_in_range(find.limit, 0, I32_MAX)}"]
    tokens += _extras("below", find.below, I64_MAX)
    tokens += _extras("since", find.since_ms, 0)
    return _line(tokens + _extras("until", find.until_ms, I64_MAX)) + find.payload


def _encode_scheduled(scheduled: ListScheduled) -> bytes:
    tokens = ["scheduled", scheduled.topic]
    tokens += [str(_in_range(scheduled.limit, 0, I32_MAX)), _i32(scheduled.opaque)]
    tokens += _extras("from", scheduled.from_ms, 0)
    return _line(tokens + _extras("to", scheduled.to_ms, I64_MAX))


def _extras(name: str, number: int, otherwise: int) -> list[str]:
    return [f"{name}={_in_range(number, 0, I64_MAX)}"] * (number != otherwise)


def _encode_stats(stats: Stats) -> bytes:
    if not stats.item:
        # The one frame with an empty token in its middle: two spaces.
        return b"stats  %d\r\n" % _in_range(stats.opaque, I32_MIN, I32_MAX)
    return _line(["stats", stats.item, _i32(stats.opaque)])


def _encode_transaction(command: TransactionCommand) -> bytes:
    timeout_s, qualifier = command.timeout_s, command.qualifier
    tokens = ["transaction", _key(command.transaction), command.session_id]
    tokens.append(command.type.value)
    # A single optional token of digits is read as the timeout, so such a qualifier
    # needs the timeout before it, and a negative timeout a qualifier after it.
    if timeout_s < 0 and qualifier is None:
        raise LocalProtocolError(f"timeout: expected 0 or more, got {timeout_s}")
    if timeout_s or (qualifier is not None and _is_number(qualifier)):
        tokens.append(_i32(timeout_s))
    if qualifier is not None:
        tokens.append(qualifier)
    return _line([*tokens, _i32(command.opaque)])


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdigit()


def _key(transaction: TransactionId) -> str:
    key = format_key(transaction)
    try:
        is_same = parse_key(key) == transaction
    except RemoteProtocolError:
        is_same = False
    if not is_same:
        raise LocalProtocolError(f"{transaction} has no key that reads back")
    return key


def _line(tokens: list[str]) -> bytes:
    return _words(tokens) + b"\r\n"


def _words(tokens: list[str]) -> bytes:
    for token in tokens:
        if not token or " " in token or "\r" in token or "\n" in token:
            raise LocalProtocolError(f"{token!r} cannot travel as a token")
    try:
        return " ".join(tokens).encode()
    except UnicodeEncodeError as error:
        raise LocalProtocolError(f"{tokens!r} cannot travel as UTF-8") from error


def _length(payload: bytes) -> str:
    return _i32(len(payload))


def _i32(number: int) -> str:
    return str(_in_range(number, I32_MIN, I32_MAX))


def _i64(number: int) -> str:
    return str(_in_range(number, I64_MIN, I64_MAX))


def _in_range(number: int, low: int, high: int) -> int:
    if not low <= number <= high:
        raise LocalProtocolError(f"expected {low}..{high}, got {number}")
    return number
