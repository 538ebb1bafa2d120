"""Keys of transactions: their ids as text, one token on the wire.

    TX:<session>:<number>                                   local
    XID:<format>:<hex global>:<hex branch>:<qualifier>      XA
    null                                                    none (key of RECOVER)

`parse_key` reads as MetaQ 1.4.6 does: trailing empty parts of a local key are ignored,
those of an XA key are not; hexadecimal digits may be of either case, and the last half
byte of an odd number of digits is dropped. So the key of a parsed id may differ from
the text that was parsed. tests/java compares it with the real broker.

Source: docs/metaq-1.4/broker.md 5.1.
"""

import re
from collections.abc import Iterable, Iterator
from functools import lru_cache
from typing import Final

from metaq.errors import RemoteProtocolError
from metaq.model import (
    NULL_TRANSACTION,
    TRANSACTION_KEY_BYTES_MAX,
    LocalTransactionId,
    NullTransactionId,
    TransactionId,
    XaTransactionId,
)
from metaq.protocol.decimals import parse_i32

KEYS_REMEMBERED_MAX: Final = 1024
"""Number of keys whose ids are cached, each at most a line of the protocol."""

LINE_END: Final = b"\r\n"
"""Ends each key in a list of keys."""

KEYS_MAX: Final = 50_000
"""Maximum number of keys in one command: as many as a Spark write has tasks. A broker
parses them in steps, and handles all transactions in one turn of its loop."""

_HEX: Final = re.compile(r"[0-9a-fA-F]*")


def format_key(transaction: TransactionId) -> str:
    """Return the key of an id; hexadecimal digits in lower case."""
    match transaction:
        case LocalTransactionId():
            return f"TX:{transaction.session_id}:{transaction.number}"
        case XaTransactionId():
            ids = f"{transaction.global_id.hex()}:{transaction.branch.hex()}"
            return f"XID:{transaction.format_id}:{ids}:{transaction.qualifier}"
        case NullTransactionId():
            return "null"


@lru_cache(KEYS_REMEMBERED_MAX)
def parse_key(key: str) -> TransactionId:
    """Return the id of a key; cached, because every command of a transaction has it.

    Raises:
        RemoteProtocolError: any other text; MetaQ closes the connection.
    """
    if key == "null":
        return NULL_TRANSACTION
    parts = key.split(":")
    if parts[0] == "TX" and len(parts := key.rstrip(":").split(":")) == 3:
        return LocalTransactionId(parts[1], parse_i32(parts[2].encode(), "transaction"))
    if parts[0] == "XID" and len(parts) == 5:
        return XaTransactionId(
            parse_i32(parts[1].encode(), "format id"),
            _parse_hex(parts[2]),
            _parse_hex(parts[3]),
            parts[4],
        )
    raise RemoteProtocolError(
        "transaction key: expected TX:session:number, "
        f"XID:format:global:branch:qualifier or null, got {key[:80]!r}"
    )


def encode_keys(transactions: Iterable[TransactionId]) -> bytes:
    """Return the keys of several transactions, one a line."""
    return b"".join([format_key(each).encode() + LINE_END for each in transactions])


def decode_keys(data: bytes, count: int) -> Iterator[TransactionId]:
    """Return the ids in the output of `encode_keys`; each is parsed when it is taken.

    Raises:
        RemoteProtocolError: there are not `count` keys, or too many, or one is invalid.
    """
    if count > KEYS_MAX:
        raise RemoteProtocolError(
            f"transaction keys: expected at most {KEYS_MAX}, got {count}"
        )
    found = data.count(LINE_END)
    rest = " and a rest" if data and not data.endswith(LINE_END) else ""
    if found != count or rest:
        raise RemoteProtocolError(
            f"transaction keys: expected {count} lines, got {found}{rest}"
        )
    lines = data.split(LINE_END)[:count]
    longest = max(map(len, lines), default=0)
    if longest > TRANSACTION_KEY_BYTES_MAX:
        raise RemoteProtocolError(
            f"transaction keys: expected at most {TRANSACTION_KEY_BYTES_MAX} bytes in"
            f" one, got {longest}"
        )
    return (parse_key(line.decode(errors="replace")) for line in lines)


def _parse_hex(text: str) -> bytes:
    if not _HEX.fullmatch(text):
        raise RemoteProtocolError(f"transaction key: {text[:80]!r} is not hexadecimal")
    return bytes.fromhex(text[: len(text) & ~1])
