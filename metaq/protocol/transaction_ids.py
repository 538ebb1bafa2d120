"""Transaction ids and their keys, the text form that travels as one token.

    TX:<session>:<number>                                   local
    XID:<format>:<hex global>:<hex branch>:<qualifier>      XA
    null                                                    none (key of RECOVER)

`parse_key` reads like MetaQ: trailing empty parts do not count, hexadecimal may be of
either case, and the last half byte of an odd number of digits is dropped. So the key
of what was read need not be the text that was read. Source: broker spec 5.1.
"""

import re
from dataclasses import dataclass
from typing import Final, TypeAlias

from metaq.errors import RemoteProtocolError
from metaq.protocol.java import parse_i32

_HEX: Final = re.compile(r"[0-9a-fA-F]*")


@dataclass(frozen=True, slots=True)
class LocalTransactionId:
    """A transaction of one session on one connection."""

    session_id: str
    """The producer's session; free of ':' and space."""
    number: int
    """Counter of the session, signed 32-bit."""

    @property
    def key(self) -> str:
        """Return the token."""
        return f"TX:{self.session_id}:{self.number}"


@dataclass(frozen=True, slots=True)
class XaTransactionId:
    """A branch of a global transaction; known to the whole broker."""

    format_id: int
    """Format of the ids, signed 32-bit."""
    global_id: bytes
    """Global transaction id; may be empty."""
    branch: bytes
    """Branch qualifier; may be empty."""
    qualifier: str
    """Name of the transaction manager's part; not blank, free of ':' and space."""

    @property
    def key(self) -> str:
        """Return the token, hexadecimal in lower case."""
        parts = (
            self.format_id,
            self.global_id.hex(),
            self.branch.hex(),
            self.qualifier,
        )
        return "XID:{}:{}:{}:{}".format(*parts)


@dataclass(frozen=True, slots=True)
class NullTransactionId:
    """No transaction, said aloud: what RECOVER carries in place of an id."""

    @property
    def key(self) -> str:
        """Return the token."""
        return "null"


TransactionId: TypeAlias = LocalTransactionId | XaTransactionId | NullTransactionId

NULL_TRANSACTION: Final = NullTransactionId()


def parse_key(key: str) -> TransactionId:
    """Return the id that `key` spells.

    Raises:
        RemoteProtocolError: any other text; MetaQ closes the connection.
    """
    if key == "null":
        return NULL_TRANSACTION
    parts = key.rstrip(":").split(":")
    if parts[0] == "TX" and len(parts) == 3:
        return LocalTransactionId(parts[1], parse_i32(parts[2].encode(), "transaction"))
    if parts[0] == "XID" and len(parts) == 5 and parts[4].strip():
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


def _parse_hex(text: str) -> bytes:
    if not _HEX.fullmatch(text):
        raise RemoteProtocolError(f"transaction key: {text[:80]!r} is not hexadecimal")
    return bytes.fromhex(text[: len(text) & ~1])
