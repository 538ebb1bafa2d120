"""Values to bytes: the forms that MetaQ's own Java clients and brokers write.

`encode` checks its argument and raises `LocalProtocolError` where the peer would
read something else than was meant: `decode` gives accepted values back unchanged.
Source: broker spec 1.3 to 1.11, 11.1.
"""

from collections.abc import Sequence
from typing import Final, assert_never

from metaq.errors import LocalProtocolError, RemoteProtocolError
from metaq.model import TransactionId
from metaq.protocol.commands import (
    NO_SEQUENCE,
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
    Value,
    Version,
)
from metaq.protocol.decimals import split_decimals
from metaq.protocol.decode import PRODUCER
from metaq.protocol.java import I32_MAX, I32_MIN, I64_MAX, I64_MIN
from metaq.protocol.transaction_ids import format_key, parse_key

QUIT: Final = b"quit\r\n"


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
            return _line(tokens)
        case OffsetQuery():
            tokens = ["offset", event.topic, event.group, _i32(event.partition)]
            tokens += [_i64(event.offset), _i32(event.opaque)]
            if event.question is not None:
                tokens.append(_question(event.question))
            return _line(tokens)
        case Version():
            return _line(["version", _i32(event.opaque)])
        case Stats():
            return _encode_stats(event)
        case Quit():
            return QUIT
        case TransactionCommand():
            return _encode_transaction(event)
        case Sync():
            tokens = ["sync", event.topic, _i32(event.partition)]
            tokens += [_length(event.payload), _i32(event.flag)]
            tokens += [_i64(event.message_id), _i32(event.checksum)]
            return _line([*tokens, _i32(event.opaque)]) + event.payload
        case Result():
            return encode_result(event.status, event.body, event.opaque)
        case Value():
            return encode_value_line(len(event.payload), event.opaque) + event.payload
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
    """Return puts to one partition, one behind the other, as `encode` writes each.

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
    head = _line(["put", topic, _i32(partition)]).removesuffix(b"\r\n")
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
        key = b" " + _line([_key(transaction)]).removesuffix(b"\r\n")
    head, key = head.replace(b"%", b"%%"), key.replace(b"%", b"%%")
    put = b"%b %%d %%d %%d%b %%d\r\n%%b" % (head, key)
    return put * count % tuple(values)


def encode_result(status: int, body: bytes, opaque: int) -> bytes:
    """Return the bytes of a `result`; an empty body is length 0 and nothing behind."""
    return b"result %d %d %d\r\n%b" % (status, len(body), opaque, body)


def encode_value_line(length: int, opaque: int) -> bytes:
    """Return the line of a `value` whose `length` bytes the caller sends itself."""
    return b"value %d %d\r\n" % (length, opaque)


def encode_put_replies(
    partition: int,
    opaques: Sequence[bytes],
    ids: Sequence[int],
    offsets: Sequence[int],
) -> bytes:
    """Return the 200 replies to a run of puts to one partition.

    The replies are made in one operation as long as their bodies have one length; one
    operation per reply would cost three times as much.

    Args:
        partition: the partition that all of them went to.
        opaques: of each put, in decimal as replies have it.
        ids: of each put; 0 or more, and growing. Cheapest if both are ranges.
        offsets: of each put; 0 or more, and growing.

    Returns:
        The replies in the same order; b"" for none.
    """
    count = len(opaques)
    if not count:
        return b""
    if count == 1:
        body = b"%d %d %d" % (ids[0], partition, offsets[0])
        return b"result 200 %d %b\r\n%b" % (len(body), opaques[0], body)
    first_id, first_offset = str(ids[0]), str(offsets[0])
    if len(first_id) == len(str(ids[-1])) and len(first_offset) == len(
        str(offsets[-1])
    ):
        body_bytes = len(first_id) + len(str(partition)) + len(first_offset) + 2
        if isinstance(ids, range) and isinstance(offsets, range):
            return _join_put_replies(partition, opaques, ids, offsets, body_bytes)
        reply = b"result 200 %d %%b\r\n%%d %d %%d" % (body_bytes, partition)
        values: list[bytes | int] = [0] * (3 * count)
        values[0::3], values[1::3], values[2::3] = opaques, ids, offsets
        return reply * count % tuple(values)
    # Somewhere inside a number gained a digit: halve until that place is isolated.
    middle = count // 2
    return encode_put_replies(
        partition, opaques[:middle], ids[:middle], offsets[:middle]
    ) + encode_put_replies(partition, opaques[middle:], ids[middle:], offsets[middle:])


def _join_put_replies(
    partition: int,
    opaques: Sequence[bytes],
    ids: range,
    offsets: range,
    body_bytes: int,
) -> bytes:
    """Return replies whose bodies are all of one length, joined from their pieces."""
    id_texts = split_decimals(ids, b"\r\n")
    offset_texts = split_decimals(offsets, b" %d " % partition)
    pieces = [b"result 200 %d " % body_bytes] * (6 * len(opaques))
    pieces[1::6], pieces[2::6], pieces[3::6] = opaques, *id_texts
    pieces[4::6], pieces[5::6] = offset_texts
    return b"".join(pieces)


def _question(question: Question) -> str:
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
    elif mput.producer == "-" or not PRODUCER.fullmatch(mput.producer):
        raise LocalProtocolError(f"producer: {mput.producer!r} is not a name")
    else:
        _in_range(mput.sequence, 0, I64_MAX)
    tokens = ["mput", mput.topic, _i32(mput.partition), _length(mput.payload)]
    tokens += [str(_in_range(mput.count, 0, I32_MAX)), _i32(mput.checksum)]
    tokens += [mput.producer or "-", str(mput.sequence)]
    if mput.transaction is not None:
        if mput.producer is not None:
            raise LocalProtocolError("a batch of a transaction has no producer")
        tokens.append(_key(mput.transaction))
    return _line([*tokens, _i32(mput.opaque)]) + mput.payload


def _encode_stats(stats: Stats) -> bytes:
    if not stats.item:
        # The one frame with an empty token in its middle: two spaces.
        return b"stats  %d\r\n" % _in_range(stats.opaque, I32_MIN, I32_MAX)
    return _line(["stats", stats.item, _i32(stats.opaque)])


def _encode_transaction(command: TransactionCommand) -> bytes:
    timeout_s, qualifier = command.timeout_s, command.qualifier
    tokens = ["transaction", _key(command.transaction), command.session_id]
    tokens.append(command.type.value)
    # A lone optional token of digits is read as the timeout, so such a qualifier
    # needs the timeout written before it, and a negative timeout a qualifier behind.
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
    for token in tokens:
        if not token or " " in token or "\r" in token or "\n" in token:
            raise LocalProtocolError(f"{token!r} cannot travel as a token")
    try:
        return " ".join(tokens).encode() + b"\r\n"
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
