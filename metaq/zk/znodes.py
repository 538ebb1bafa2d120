"""The payload of every node: exact when written, tolerant when read.

    node                              bytes (UTF-8)
    --------------------------------  ------------------------------------------
    broker, leader, follower,
    recorded broker                   meta://HOST:PORT        meta://[::1]:8123
    config checksum                   DECIMAL                 463763767
    topic, recorded partitions        DECIMAL                 2
    topic-pub, topic-sub              JSON, no spaces    {"numParts":2,"broker":"0-m"}
    member                            TOPIC,TOPIC,...         test,meta-test
    recorded directories              JSON       {"/data":["4be1",2]}
    owner                             MEMBER                  g1_192.0.2.1-12139-10f6...
    group offset                      ID-OFFSET               -5468920727941939200-108
                                      OFFSET (before 1.4)     108

Java peers compare some of these as text and refuse unknown JSON properties, so the
encoders write exactly what the Java broker writes. The decoders accept white space
around values, JSON properties in any order and unknown properties, because there are
other writers; any other payload is a PayloadError.

Keep in step: `paths.py`, this package's README.

Source: docs/metaq-1.4/broker.md 3.2 and 3.6, docs/metaq-1.4/client.md 4.
"""

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from metaq.model import (
    SCHEME,
    BrokerAddress,
    GroupOffset,
    MessageId,
    Offset,
    parse_broker_address,
)
from metaq.zk.errors import PayloadError
from metaq.zk.paths import BrokerRole, parse_role

OFFSET_MAX: Final = 2**63 - 1
# A Java int, the type of the count in MetaQ.
PARTITION_COUNT_MAX: Final = 2**31 - 1
# Longer than any valid number, so that int() never gets a megabyte of digits.
DIGITS_MAX: Final = 20


@dataclass(frozen=True, slots=True)
class Node:
    """A node as read."""

    data: bytes
    """Payload; b"" for the null data of parents."""
    owner_session_id: int
    """Id of the session that an ephemeral node belongs to; 0 for a persistent node."""
    version: int


def _text(data: bytes, what: str) -> str:
    try:
        return data.decode().strip()
    except UnicodeDecodeError as error:
        raise PayloadError(f"{what}: expected UTF-8, got {data[:80]!r}") from error


def _number(text: str, what: str, maximum: int) -> int:
    is_number = re.fullmatch(r"\d+", text, re.ASCII) and len(text) <= DIGITS_MAX
    if not is_number or int(text) > maximum:
        raise PayloadError(
            f"{what}: expected a number from 0 to {maximum}, got {text[:80]!r}"
        )
    return int(text)


# -- where a broker is ----------------------------------------------------------------


def encode_address(address: BrokerAddress) -> bytes:
    """Return `meta://host:port`, an IPv6 host in brackets."""
    return str(address).encode()


def decode_address(data: bytes) -> BrokerAddress:
    """Decode a broker's address; a `?slaveId=K` after it is ignored.

    Raises:
        PayloadError: it is not `meta://host:port` with a port from 1 to 65535 and a
            printable host.
    """
    text = _text(data, "broker address")
    address = parse_broker_address(text)
    if address is None:
        raise PayloadError(
            f"broker address: expected {SCHEME}host:port, got {text[:80]!r}"
        )
    return address


# -- numbers --------------------------------------------------------------------------


def encode_checksum(checksum: int) -> bytes:
    """Return an unsigned CRC-32 as decimal text."""
    return b"%d" % checksum


def encode_partition_count(count: int) -> bytes:
    """Return a topic's partition count as clients before 1.4.3 read it."""
    return b"%d" % count


def decode_partition_count(data: bytes) -> int:
    """Decode a bare partition count.

    Raises:
        PayloadError: not a number of 0 or more.
    """
    text = _text(data, "partition count")
    return _number(text, "partition count", PARTITION_COUNT_MAX)


# -- topics ---------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class TopicRegistration:
    """Payload of a node below topics-pub or topics-sub."""

    partition_count: int
    role: BrokerRole
    """Copy of the broker that registered it; also in the node's name."""


def encode_registration(registration: TopicRegistration) -> bytes:
    """Return `{"numParts":2,"broker":"0-m"}`: this order, no spaces, nothing more."""
    fields = {
        "numParts": registration.partition_count,
        "broker": str(registration.role),
    }
    return json.dumps(fields, separators=(",", ":")).encode()


def decode_registration(data: bytes) -> TopicRegistration:
    """Decode a topic's registration; properties in any order, unknown ones ignored.

    Raises:
        PayloadError: it is not a JSON object, or has no valid numParts or broker.
    """
    what = "topic registration"
    text = _text(data, what)
    try:
        fields = json.loads(text)
    # Deep nesting ends in RecursionError, a huge number in ValueError.
    except (ValueError, RecursionError) as error:
        raise PayloadError(f"{what}: expected JSON, got {text[:80]!r}") from error
    if not isinstance(fields, dict):
        raise PayloadError(f"{what}: expected a JSON object, got {text[:80]!r}")
    count = fields.get("numParts")
    if isinstance(count, bool) or not isinstance(count, int | str):
        raise PayloadError(f"{what}: expected a number numParts, got {text[:80]!r}")
    if isinstance(count, int) and not 0 <= count <= PARTITION_COUNT_MAX:
        raise PayloadError(
            f"{what}: expected numParts from 0 to {PARTITION_COUNT_MAX},"
            f" got {text[:80]!r}"
        )
    if isinstance(count, str):
        count = _number(count.strip(), what, PARTITION_COUNT_MAX)
    role = parse_role(str(fields.get("broker")))
    if role is None:
        raise PayloadError(f"{what}: expected a broker like '0-m', got {text[:80]!r}")
    return TopicRegistration(partition_count=count, role=role)


# -- consumer groups ------------------------------------------------------------------


def encode_member_topics(topics: Iterable[str]) -> bytes:
    """Return the topics a member subscribes to, comma-joined, order kept."""
    return ",".join(topics).encode()


def decode_member_topics(data: bytes) -> tuple[str, ...]:
    """Decode a member's topics, order kept; blank names are dropped.

    Raises:
        PayloadError: not UTF-8.
    """
    parts = (part.strip() for part in _text(data, "member topics").split(","))
    return tuple(part for part in parts if part)


def encode_owner(member: str) -> bytes:
    """Return the name of the member that owns a partition."""
    return member.encode()


def decode_owner(data: bytes) -> str:
    """Decode the owner of a partition.

    Raises:
        PayloadError: not UTF-8, or blank.
    """
    text = _text(data, "owner")
    if not text:
        raise PayloadError("owner: expected a member's name, got nothing")
    return text


def encode_group_offset(group_offset: GroupOffset) -> bytes:
    """Return `id-offset`, or the bare offset if there is no id."""
    if group_offset.message_id is None:
        return b"%d" % group_offset.offset
    return b"%d-%d" % (group_offset.message_id, group_offset.offset)


def decode_group_offset(data: bytes) -> GroupOffset:
    """Decode a group's offset. Ids may be negative, so it is split at the *last* '-'.

    Raises:
        PayloadError: it is neither `id-offset` nor a bare offset.
    """
    what = "group offset"
    text = _text(data, what)
    cut = text.rfind("-")
    if cut <= 0:
        return GroupOffset(offset=Offset(_number(text, what, OFFSET_MAX)))
    left, right = text[:cut], text[cut + 1 :]
    is_negative = left.startswith("-")
    # 2**63 itself is in range on the negative side only.
    magnitude = _number(left.removeprefix("-"), what, OFFSET_MAX + is_negative)
    return GroupOffset(
        offset=Offset(_number(right, what, OFFSET_MAX)),
        message_id=MessageId(-magnitude if is_negative else magnitude),
    )


def encode_directories(directories: Mapping[str, tuple[str, int]]) -> bytes:
    """Return path → identity and partition count as JSON, paths sorted."""
    return json.dumps(
        {path: list(directories[path]) for path in sorted(directories)},
        separators=(",", ":"),
    ).encode()


def decode_directories(data: bytes) -> dict[str, tuple[str, int]]:
    """Decode the data directories of a broker.

    Raises:
        PayloadError: it is not JSON, or not of that shape.
    """
    what = "recorded directories"
    try:
        return {
            path: (str(identity), int(count))
            for path, (identity, count) in json.loads(_text(data, what)).items()
        }
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        raise PayloadError(f"{what}: expected paths in JSON, got {data!r}") from error
