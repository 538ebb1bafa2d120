"""Error texts of MetaQ 1.4, word for word; our own error texts; their codes. Pure.

Clients match some of the texts and operators search for all of them, so handlers and
tests use them verbatim, mistakes of grammar included.

    <text> [damaged from=375 to=500 file=/data/test-0/00000000000000000000.meta]

A code is machine-readable and ends the body: one word and `name=value` pairs. Old peers
see a slightly longer text; a peer that knows the word does not need the text. Values
are percent-encoded, so a file name in them has neither spaces nor brackets. Unknown
words and names are ignored. Brokers that write codes announce `codes` (`version.py`).

Source: docs/metaq-1.4/broker.md 1.2 (rule 9), 1.4, 1.5.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from metaq.errors import CorruptRecordError
from metaq.model import MAX_OFFSET, LogId, printable, span_text

CHECKSUM_FAILURE: Final = (
    "Checksum failure,message may be corrupted when transfering on networking."
)
"""Detail of a put whose payload does not match its checksum (500)."""

NO_SYNC_PROCESSOR: Final = (
    "未注册请求处理器，请求处理器类为com.taobao.metamorphosis.network.SyncCommand"  # noqa: RUF001  # MetaQ's text has full-width punctuation
)
"""Reply to a sync at a broker that is not a follower (503)."""

NO_QUEUES: Final = "This broker serves no queue groups."
"""Our reply to a take or settle that comes too early or too late (503)."""

NO_DELAY: Final = "This broker delays no messages: send without a time."
"""Our reply to commands with a time where transactions are refused (503)."""

NO_REPLICA_SET: Final = "This broker is no replica of a set."
"""Our reply to a message of a replica (503)."""

INTERNAL_ERROR: Final = "Internal error, see the broker's log."
"""Our reply to a command that hit a bug (500); the log has the traceback."""

LOG_START_MOVED: Final = "the log start has moved: ask again"
"""Our reply to a question about segments that retention has just removed (503)."""

NO_ROOM_PREFIX: Final = "no room: "
"""Start of our detail of a put refused for lack of free space (500)."""

SHOWN_CHARS_MAX: Final = 255
"""Maximum number of characters of a routing key that a refusal shows."""


def put_failed(broker_uri: str, topic: str, partition: int, detail: str = "") -> str:
    """Return the text of a refused put (403 or 500), and of a failed get (500).

    Args:
        broker_uri: the advertised address, `meta://host:port`.
        topic: topic as sent.
        partition: the resolved one; the one sent, if it failed before that.
        detail: the error; "" after an I/O error.
    """
    text = (
        f"Put message to [broker '{broker_uri}'] "
        f"[partition '{topic}-{partition}'] failed."
    )
    return f"{text}Detail:{detail}" if detail else text


def says_disk_failed(text: str) -> bool:
    """Return whether MetaQ 1.4 sent the text after an I/O error: it has no detail."""
    return text.endswith("] failed.")


def says_unregistered(text: str) -> bool:
    """Return whether a MetaQ 1.4 broker had not yet registered the topic of a put.

    Such a broker opens its port before it has registered its topics; a put in between
    fails, and the message is not stored.
    """
    return "] failed.Detail:org.apache.zookeeper.KeeperException" in text


def with_damage(text: str, error: CorruptRecordError, *, offset: int, end: int) -> str:
    """Return the text of an error followed by the code that names the damage.

    Args:
        text: for people.
        error: the damage.
        offset: the requested offset; the start of the damage, if the error has none.
        end: the log end; the offset to resume at, if nothing after the damage is good
            and the requested offset is before it.
    """
    start, good = error.offset, error.next_good_offset
    values = {
        "from": offset if start is None else start,
        "to": end if good is None and offset < end else good,
        "file": error.path,
        "why": error.detail or None,
    }
    return with_code(text, DAMAGED, values)


def closed_detail(broker_id: int, partition: int) -> str:
    """Return the detail of a put to a closed partition (403)."""
    return f"partition[{broker_id}-{partition}] has been closed"


def wrong_partition(partition: int) -> str:
    """Return the detail of a put to a partition out of range (500)."""
    return f"wrong partition {partition}"


def invalid_transactional_partition(partition: int) -> str:
    """Return the text of a put in a transaction to partition -1, "any" (500)."""
    return f"Invalid partition for transaction command:{partition}"


def no_transaction(word: str) -> str:
    """Return our text for a command on no transaction (500); MetaQ's names classes."""
    return f"{word} needs a transaction, got 'null'."


def topic_not_accepted(topic: str) -> str:
    """Return the detail of a put to a topic that is not configured (500)."""
    return f"The server do not accept topic {topic}"


def get_closed(broker_id: int, partition: int) -> str:
    """Return the text of a get from a closed partition (403)."""
    return f"Partition[{broker_id}-{partition}] has been closed"


def no_such_log(topic: str, partition: int) -> str:
    """Return the text of a get or offset query for a missing log (404)."""
    return f"The topic `{topic}` in partition `{partition}` is not exists"


def invalid_max_size(max_size: int) -> str:
    """Return the text of a get with a maximum size of 0 or less (400)."""
    return f"Bad request,invalid max size:{max_size}"


def nothing_at(offset: int) -> str:
    """Return the text of a get at or after the end (404)."""
    return f"Could not find message at position {offset}"


def not_settled(topic: str, partition: int) -> str:
    """Return our text for a question about a log end that is not known yet (503)."""
    text = f"partition {topic}-{partition} has no known end before its leader has it"
    return with_code(text, NOT_SETTLED, {})


def being_mended(log_id: LogId, offset: int) -> str:
    """Return our text for damage that may be repaired from another replica (503)."""
    text = f"partition {log_id} is not mended yet at offset {offset}"
    return with_code(text, NOT_SETTLED, {})


def queue_group_unknown(group: str) -> str:
    """Return our text for a queue group that this broker does not know yet (503)."""
    return with_code(f"queue group '{group}' is not defined here", NOT_DEFINED, {})


def no_exchange(name: str) -> str:
    """Return our text for a mandatory put to a name that is not an exchange (500)."""
    return with_code(f"'{name}' is no exchange on this broker", NO_EXCHANGE, {})


def exchange_not_served(name: str, reason: str) -> str:
    """Return our text for a put to an exchange that is not served here (500)."""
    text = f"exchange '{name}' is not served by this broker: {printable(reason)}"
    return with_code(text, NO_EXCHANGE, {})


def unroutable(
    exchange: str, routing_key: str, numbers: Sequence[int], count: int
) -> str:
    """Return our text for mandatory messages that no binding matches (500).

    Args:
        exchange: its name.
        routing_key: routing key of the first unroutable message.
        numbers: numbers of the unroutable messages in their batch.
        count: number of messages in the batch.
    """
    # An exchange that does not compare routing keys has attributes of any length here.
    is_long = len(routing_key) > SHOWN_CHARS_MAX
    key = printable(routing_key[:SHOWN_CHARS_MAX]) + "..." * is_long
    text = f"no binding of exchange '{exchange}' matches routing key '{key}'"
    if len(numbers) > 1:
        text += f" (and {len(numbers) - 1} more)"
    return with_code(text, UNROUTABLE, refused(numbers, count))


def too_far(numbers: Sequence[int], count: int, limit_ms: int, wanted_ms: int) -> str:
    """Return our text for messages whose times are too far away (500).

    Args:
        numbers: numbers of these messages in their batch.
        count: number of messages in the batch.
        limit_ms: the longest delay, in milliseconds.
        wanted_ms: delay of the first of these messages, in milliseconds.
    """
    others = f" and {len(numbers) - 1} more" if len(numbers) > 1 else ""
    text = (
        f"mput: message {numbers[0]}{others}: expected a time within"
        f" {span_text(limit_ms)}, got one in {span_text(wanted_ms)}"
    )
    return with_code(text, TOO_FAR, refused(numbers, count))


def too_many_checks(count_max: int) -> str:
    """Return our text for a check above the limit of concurrent checks (503)."""
    return f"{count_max} checks are not answered yet: ask again"


def too_many_finds(count_max: int) -> str:
    """Return our text for a find above the limit of concurrent finds (503)."""
    return f"{count_max} look-ups are not answered yet: ask again"


def put_reply(message_id: int, partition: int, offset: int) -> str:
    """Return the body of the 200 to a put, sync or mput.

    Args:
        message_id: id of the (first) record.
        partition: the partition really used.
        offset: offset of the (first) record's first byte.
    """
    return f"{message_id} {partition} {offset}"


def too_large(word: str, length: int, limit: int) -> str:
    """Return our text for a payload over its cap (500); MetaQ has no cap."""
    return f"{word}: payload of {length} bytes exceeds the limit of {limit} bytes"


def no_record_starts(partition: str, offset: int) -> str:
    """Return our text for a range with an end inside a record (500)."""
    text = f"no record of partition {partition} starts at offset {offset}"
    return with_code(text, NO_RECORD, {})


# -- codes ----------------------------------------------------------------------------

DAMAGED: Final = "damaged"
"""Requested bytes of the log contradict a checksum or are missing. Values: `from` and
`to`; `file`, if it is one file; `why`, in words."""
NO_ROOM: Final = "no-room"
"""A put is not stored: there is no free space now."""
IN_DOUBT: Final = "in-doubt"
"""The disk failed, or the broker stopped, during a put: it may be stored."""
UNROUTED: Final = "no binding of the exchange matches the message: it is not stored"
"""Client's text for a put that an exchange dropped."""
UNROUTABLE: Final = "unroutable"
"""A mandatory put to an exchange is not stored: a message of it matches no binding.
`messages`: the numbers of these messages in their batch, as in `too-far`."""
NO_EXCHANGE: Final = "no-exchange"
"""A put with a route is not stored: its target is no exchange served here."""
TOO_FAR: Final = "too-far"
"""A put with a time is not stored: some of its times are too far away. `messages`: the
numbers of these messages, the first NAMED_MAX, in a batch of several."""
SEQUENCE_USED: Final = "sequence-used"
"""A batch is not stored: its producer has used its sequence before."""
NO_RECORD: Final = "no-record"
"""An end of the requested range is not the start of a record."""
NOT_LEADER: Final = "not-leader"
"""Refused because another replica leads the set, or none does: a put is not stored.
`address`: the leader's, if known."""
TOO_FEW_REPLICAS: Final = "too-few-replicas"
"""A put is not stored: fewer replicas than the set's minimum would have it."""
NOT_SETTLED: Final = "not-settled"
"""Unknown for now: a log end, until its leader knows how much of it the set has; or
damaged bytes, until another replica's have replaced them."""

NOT_DEFINED: Final = "not-defined"
"""This broker knows no such queue group; its definition may arrive later."""

NAMED_MAX: Final = 256
"""Maximum number of messages that a code names; they fit into the longest value."""

_TAIL_CHARS_MAX: Final = 4096
"""Longest code, in characters; a longer one is not recognised."""
_NAME: Final = "[a-z][a-z0-9-]{0,31}"
_CODE: Final = re.compile(rf" \[({_NAME})((?: {_NAME}=[!-Z\\^-~]*)*)\]")
_NUMBERS: Final = re.compile(r"[0-9]{1,9}(?:,[0-9]{1,9})*")
_UNSAFE: Final = re.compile(rb"[^0-9A-Za-z/:,()._~-]")
"""Bytes to be written as a percent sign and two hexadecimal digits."""
_ESCAPED: Final = re.compile(rb"%([0-9A-Fa-f]{2})")


@dataclass(frozen=True, slots=True)
class ReplyCode:
    """One code."""

    word: str
    """The code: lower-case letters, digits and `-`."""
    values: Mapping[str, str]

    def number(self, name: str) -> int | None:
        """Return a value as a number of 0 to 2**63 - 1; None if it is not one."""
        text = self.values.get(name, "")
        if not (
            text.isascii() and text.isdigit() and len(text) <= len(str(MAX_OFFSET))
        ):
            return None
        number = int(text)
        return number if number <= MAX_OFFSET else None

    @property
    def messages(self) -> tuple[int, ...]:
        """Return the numbers of the messages in the code; () if it has none."""
        text = self.values.get("messages", "")
        return tuple(map(int, text.split(","))) if _NUMBERS.fullmatch(text) else ()


def refused(numbers: Sequence[int], count: int) -> Mapping[str, object]:
    """Return the values of a code that names messages; empty for a batch of one.

    Args:
        numbers: numbers of the messages in their batch.
        count: number of messages in the batch.
    """
    if count == 1:
        return {}
    return {"messages": ",".join(map(str, numbers[:NAMED_MAX]))}


def with_code(text: str, word: str, values: Mapping[str, object]) -> str:
    """Return a text followed by a code; a value of None is left out.

    Args:
        text: for people.
        word: see `ReplyCode`.
        values: texts and numbers; shortened where the code would be too long.
    """
    char_count = _TAIL_CHARS_MAX // 2 // max(1, len(values))
    pairs = "".join(
        f" {name}={_encoded(str(value), char_count)}"
        for name, value in values.items()
        if value is not None
    )
    return f"{text} [{word}{pairs}]"


def _encoded(value: str, count_max: int) -> str:
    """Return a value cut to `count_max` characters; a cut one then ends in `...`."""
    # One character becomes up to twelve: percent signs and hexadecimal digits.
    shown = value if len(value) <= count_max else value[: count_max // 12] + "..."
    raw = shown.encode(errors="backslashreplace")
    encoded = _UNSAFE.sub(lambda found: b"%%%02X" % found[0][0], raw).decode()
    if len(encoded) <= count_max or shown is not value:
        return encoded
    return _encoded(value[: count_max // 12] + "...", count_max)


def _decoded(text: str) -> str:
    raw = _ESCAPED.sub(lambda found: bytes([int(found[1], 16)]), text.encode())
    return raw.decode(errors="replace")


def split_code(body: str) -> tuple[str, ReplyCode | None]:
    """Return the text of a body without its code, and the code; None if it has none."""
    start = body.rfind(" [", max(0, len(body) - _TAIL_CHARS_MAX))
    found = _CODE.fullmatch(body, start) if start >= 0 else None
    if found is None:
        return body, None
    pairs = (pair.partition("=") for pair in found[2].split())
    values = {name: _decoded(value) for name, _, value in pairs}
    return body[:start], ReplyCode(found[1], values)
