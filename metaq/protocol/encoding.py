"""Commands and replies to bytes.

`encode` writes the same bytes as MetaQ's own Java clients and brokers. It checks its
argument and raises `LocalProtocolError` if the peer would decode something else: what
it accepts is decoded to an equal value (`decoding.py`).

Keep the table in README.md in step. Source: docs/metaq-1.4/broker.md 1.2 to 1.11, 11.1.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import Final, assert_never

from metaq.errors import LocalProtocolError, RemoteProtocolError, WireError
from metaq.model import TransactionId
from metaq.protocol.commands import (
    NO_NEXT,
    NO_SEQUENCE,
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
    Value,
    Version,
)
from metaq.protocol.decimals import (
    I32_MAX,
    I32_MIN,
    I64_MAX,
    I64_MIN,
)
from metaq.protocol.escapes import escape
from metaq.protocol.names import (
    MAILBOX,
    NO_PRODUCER,
    PRODUCER,
    TOGETHER,
    WORDS_REMEMBERED_MAX,
)
from metaq.protocol.transaction_ids import format_key, parse_key

QUIT: Final = b"quit\r\n"


def encode(event: Command | Reply) -> bytes:
    """Return the bytes of a command or reply, payload included.

    Raises:
        LocalProtocolError: a name is empty or contains a space or line end, or a number
            does not fit its field.
    """
    match event:
        case Put():
            return _encode_put(event)
        case Mput():
            return _encode_mput(event)
        case Get():
            return _encode_get(event)
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
            return _encode_settle(event)
        case Cancel():
            tokens = ["cancel", event.topic, _length(event.payload)]
            return _line([*tokens, _i32(event.opaque)]) + event.payload
        case Find():
            return _encode_find(event)
        case ListScheduled():
            return _encode_scheduled(event)
        case Listen():
            tokens = ["listen", _mailbox_word(event.mailbox), _i32(event.opaque)]
            return _line(tokens + _wait_words(event.wait_ms))
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
            tokens = ["transactions", event.session_id, TOGETHER.decode()]
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
    """Return puts to one partition, back to back, each as `encode` writes it.

    All are formatted in one operation; one per put would take ten times as long.

    Args:
        topic: topic of all puts.
        partition: partition of all puts.
        payloads: at least one.
        flags: flag of each put; None if all are 0.
        checksums: checksum of each payload.
        opaques: opaque of each put.
        transaction: transaction of all puts; None appends each at once.

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


def encode_refusal(error: WireError, opaque: int) -> bytes:
    """Return the bytes of the `result` that reports an error."""
    return encode_result(error.status, str(error).encode(), opaque)


def encode_value_line(
    length: int, opaque: int, next_offset: int = NO_NEXT, read_bytes: int = 0
) -> bytes:
    """Return the line of a `value`; the caller sends its `length` bytes itself."""
    after = b"" if next_offset == NO_NEXT else b" next=%d" % next_offset
    read = b" read=%d" % read_bytes if read_bytes else b""
    return b"value %d %d%b%b\r\n" % (length, opaque, after, read)


def _encode_get(get: Get) -> bytes:
    tokens = ["get", get.topic, get.group, _i32(get.partition), _i64(get.offset)]
    tokens += [_i32(get.max_size), _i32(get.opaque), *_wait_words(get.wait_ms)]
    if get.where is not None:
        tokens.append(f"where={escape(get.where)}")
    return _line(tokens)


def _wait_words(wait_ms: int) -> list[str]:
    return [f"wait={_in_range(wait_ms, 0, I32_MAX)}"] if wait_ms else []


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
    if mput.deliver_ms == OWN_TIMES:
        extra = b" deliver=each"
    elif mput.deliver_ms is not None:
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


# Cached, because nearly all batches of a client have one producer and few partitions.
@lru_cache(WORDS_REMEMBERED_MAX)
def _mput_words(topic: str, partition: int) -> bytes:
    return _words(["mput", topic, _i32(partition)])


@lru_cache(WORDS_REMEMBERED_MAX)
def _producer_word(producer: str | None) -> bytes:
    if producer is None:
        return NO_PRODUCER
    if producer == "-" or not PRODUCER.fullmatch(producer):
        raise LocalProtocolError(f"producer: {producer!r} is not a name")
    return producer.encode()


@lru_cache(WORDS_REMEMBERED_MAX)
def _worker_words(worker: str, generation: int | None) -> bytes:
    line = b" worker=%b" % _producer_word(worker)
    if generation is not None:
        line += b" generation=%d" % _in_range(generation, 0, I64_MAX)
    return line


@lru_cache(WORDS_REMEMBERED_MAX)
def _queue_words(word: str, topic: str, group: str, partition: int) -> bytes:
    return _words([word, topic, group, _i32(partition)])


def _mailbox_word(mailbox: str) -> str:
    if not MAILBOX.fullmatch(mailbox):
        raise LocalProtocolError(f"mailbox: {mailbox!r} is not a name")
    return mailbox


def _encode_settle(settle: Settle) -> bytes:
    line = b"%b %d %d %d%b" % (
        _queue_words("settle", settle.topic, settle.group, settle.partition),
        _in_range(settle.count, 1, I32_MAX),
        _in_range(len(settle.payload), 0, I32_MAX),
        _in_range(settle.opaque, I32_MIN, I32_MAX),
        _worker_words(settle.worker, settle.generation),
    )
    if settle.transaction is not None:
        line += b" " + _words([f"tx={_key(settle.transaction)}"])
    return line + b"\r\n" + settle.payload


def _encode_take(take: Take) -> bytes:
    lease = wait = b""
    if take.lease_ms:
        lease = b" lease=%d" % _in_range(take.lease_ms, 1, I32_MAX)
    if take.wait_ms:
        wait = b" wait=%d" % _in_range(take.wait_ms, 0, I32_MAX)
    return b"%b %d %d %d%b%b%b\r\n" % (
        _queue_words("take", take.topic, take.group, take.partition),
        _in_range(take.count, I32_MIN, I32_MAX),
        _in_range(take.max_size, I32_MIN, I32_MAX),
        _in_range(take.opaque, I32_MIN, I32_MAX),
        lease,
        _worker_words(take.worker, take.generation),
        wait,
    )


def _encode_find(find: Find) -> bytes:
    partitions = ",".join(map(_i32, (find.partition, *find.others)))
    tokens = ["find", find.topic, partitions, _length(find.payload)]
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
        # The only frame with an empty token inside: two spaces.
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
