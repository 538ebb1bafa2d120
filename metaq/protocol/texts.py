"""The error texts of MetaQ 1.4, word for word, our own, and their codes. Pure.

Clients match some of them and operators search for all of them, so handlers and tests
use these verbatim, mistakes of grammar included.

    <text> [damaged from=375 to=500 file=/data/test-0/00000000000000000000.meta]

A code is for machines, and ends the body: one word and `name=value` pairs. Old peers
see a slightly longer text; a peer that knows the word does not need the sentence.
Values are percent-encoded, so that the name of a file has neither blanks nor brackets.
Unknown words and names are ignored. Brokers that write codes announce `codes`
(`version.py`).

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
"""A sync sent to a broker that is no follower (503)."""

NO_QUEUES: Final = "This broker serves no queue groups."
"""Our answer to a take or settle that comes too early or too late (503)."""

NO_DELAY: Final = "This broker delays no messages: send without a time."
"""Our answer to what is about a time where transactions are refused, as in a replica
set (503)."""

NO_REPLICA_SET: Final = "This broker is no replica of a set."
"""Our answer to a message of a replica (503)."""

INTERNAL_ERROR: Final = "Internal error, see the broker's log."
"""Our answer to a command that found a bug (500); the log has the traceback."""

LOG_START_MOVED: Final = "the log start has moved: ask again"
"""Our answer to a question about segments that retention has just removed (503)."""

NO_ROOM_PREFIX: Final = "no room: "
"""Start of our detail of a put without free space (500)."""

SHOWN_CHARS_MAX: Final = 255
"""Characters that a refusal shows of a routing key."""


def put_failed(broker_uri: str, topic: str, partition: int, detail: str = "") -> str:
    """Return the text of a refused put (403 or 500), and of a get that broke (500).

    Args:
        broker_uri: the advertised address, `meta://host:port`.
        topic: topic as sent.
        partition: as resolved; as sent when it failed before that.
        detail: the error; "" after an I/O error.
    """
    text = (
        f"Put message to [broker '{broker_uri}'] "
        f"[partition '{topic}-{partition}'] failed."
    )
    return f"{text}Detail:{detail}" if detail else text


def says_disk_failed(text: str) -> bool:
    """Return whether MetaQ 1.4 sent a text after an I/O error: it has no detail."""
    return text.endswith("] failed.")


def says_unregistered(text: str) -> bool:
    """Return whether a MetaQ 1.4 broker could not register the topic of a put.

    It opens its port before it has registered its topics, and a put in between fails;
    the message is not stored.
    """
    return "] failed.Detail:org.apache.zookeeper.KeeperException" in text


def with_damage(text: str, error: CorruptRecordError, *, offset: int, end: int) -> str:
    """Return the text of an error followed by the code that names the damage.

    Args:
        text: for people.
        error: the damage.
        offset: the requested offset; start of the damage, if the error has none.
        end: the end of the log; where to resume, if nothing is good after the damage
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
    """Return the text of a put in a transaction to any partition (500)."""
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
    """Return the text of a get or offset query without a log (404)."""
    return f"The topic `{topic}` in partition `{partition}` is not exists"


def invalid_max_size(max_size: int) -> str:
    """Return the text of a get that wants nothing (400)."""
    return f"Bad request,invalid max size:{max_size}"


def nothing_at(offset: int) -> str:
    """Return the text of a get at or after the end (404)."""
    return f"Could not find message at position {offset}"


def not_settled(topic: str, partition: int) -> str:
    """Return our text for a question about an end that is not known yet (503)."""
    text = f"partition {topic}-{partition} has no known end before its leader has it"
    return with_code(text, NOT_SETTLED, {})


def being_mended(log_id: LogId, offset: int) -> str:
    """Return our text for damage that another replica may mend (503)."""
    text = f"partition {log_id} is not mended yet at offset {offset}"
    return with_code(text, NOT_SETTLED, {})


def queue_group_unknown(group: str) -> str:
    """Return our text for a queue group that is not defined here, or not yet (503)."""
    return with_code(f"queue group '{group}' is not defined here", NOT_DEFINED, {})


def no_exchange(name: str) -> str:
    """Return our text for a mandatory put to what is no exchange (500)."""
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
        routing_key: of the first of them.
        numbers: theirs in their batch.
        count: messages of the batch.
    """
    # An exchange that compares none has an attribute of any length for it.
    is_long = len(routing_key) > SHOWN_CHARS_MAX
    key = printable(routing_key[:SHOWN_CHARS_MAX]) + "..." * is_long
    text = f"no binding of exchange '{exchange}' matches routing key '{key}'"
    if len(numbers) > 1:
        text += f" (and {len(numbers) - 1} more)"
    return with_code(text, UNROUTABLE, refused(numbers, count))


def too_far(numbers: Sequence[int], count: int, limit_ms: int, wanted_ms: int) -> str:
    """Return our text for messages with times that are too far away (500).

    Args:
        numbers: theirs in their batch.
        count: messages of the batch.
        limit_ms: the longest delay.
        wanted_ms: that of the first of them.
    """
    others = f" and {len(numbers) - 1} more" if len(numbers) > 1 else ""
    text = (
        f"mput: message {numbers[0]}{others}: expected a time within"
        f" {span_text(limit_ms)}, got one in {span_text(wanted_ms)}"
    )
    return with_code(text, TOO_FAR, refused(numbers, count))


def too_many_checks(count_max: int) -> str:
    """Return our text for one check too many (503)."""
    return f"{count_max} checks are not answered yet: ask again"


def too_many_finds(count_max: int) -> str:
    """Return our text for one look-up too many (503)."""
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
    """Return our text for a range that ends inside a record (500)."""
    text = f"no record of partition {partition} starts at offset {offset}"
    return with_code(text, NO_RECORD, {})


# -- codes ----------------------------------------------------------------------------

DAMAGED: Final = "damaged"
"""Requested bytes of the log contradict a checksum, or are missing: `from` and `to`,
`file` where it is one file, `why` in words."""
NO_ROOM: Final = "no-room"
"""A put is not stored: there is no free space now."""
IN_DOUBT: Final = "in-doubt"
"""The disk failed, or the broker stopped, under a put: it may be stored."""
UNROUTED: Final = "no binding of the exchange matches the message: it is not stored"
"""Of a client, for a put that an exchange has dropped."""
UNROUTABLE: Final = "unroutable"
"""A mandatory put to an exchange is not stored: no binding matches a message of it.
`messages` are the numbers of such messages in their batch, as of `too-far`."""
NO_EXCHANGE: Final = "no-exchange"
"""A put with a route is not stored: what it is to is a topic, or is not there, or not
served here."""
TOO_FAR: Final = "too-far"
"""A put with a time is not stored: times of some of its messages are too far away.
`messages` are the numbers of these, the first NAMED_MAX, in a batch of several."""
SEQUENCE_USED: Final = "sequence-used"
"""A batch is not stored: its producer has used its sequence before."""
NO_RECORD: Final = "no-record"
"""No record starts at an end of the requested range."""
NOT_LEADER: Final = "not-leader"
"""Refused because another replica of the set leads, or none: a put is not stored.
`address` is the leader's, where it is known."""
TOO_FEW_REPLICAS: Final = "too-few-replicas"
"""A put is not stored: fewer replicas than the set's minimum would have it."""
NOT_SETTLED: Final = "not-settled"
"""Nothing can be said about the end of a log until its leader knows how much of it the
set has, or about damaged bytes until another replica's have replaced them."""

NOT_DEFINED: Final = "not-defined"
"""No such queue group is known to this broker; its definition may be on its way."""

NAMED_MAX: Final = 256
"""Most messages that a code names; they take less than the longest value."""

_TAIL_CHARS_MAX: Final = 4096
"""Longest code; longer text is ignored."""
_NAME: Final = "[a-z][a-z0-9-]{0,31}"
_CODE: Final = re.compile(rf" \[({_NAME})((?: {_NAME}=[!-Z\\^-~]*)*)\]")
_NUMBERS: Final = re.compile(r"[0-9]{1,9}(?:,[0-9]{1,9})*")
_UNSAFE: Final = re.compile(rb"[^0-9A-Za-z/:,()._~-]")
"""Written as a percent sign and two hexadecimal digits."""
_ESCAPED: Final = re.compile(rb"%([0-9A-Fa-f]{2})")


@dataclass(frozen=True, slots=True)
class ReplyCode:
    """One code."""

    word: str
    """The code: lower-case letters, digits and `-`."""
    values: Mapping[str, str]

    def number(self, name: str) -> int | None:
        """Return a value that is a number of 0 to 2**63 - 1; None otherwise."""
        text = self.values.get(name, "")
        if not (
            text.isascii() and text.isdigit() and len(text) <= len(str(MAX_OFFSET))
        ):
            return None
        number = int(text)
        return number if number <= MAX_OFFSET else None

    @property
    def messages(self) -> tuple[int, ...]:
        """Return the numbers of the messages that it names; (): it names none."""
        text = self.values.get("messages", "")
        return tuple(map(int, text.split(","))) if _NUMBERS.fullmatch(text) else ()


def refused(numbers: Sequence[int], count: int) -> Mapping[str, object]:
    """Return the values of a code that names messages; none: there is but one.

    Args:
        numbers: of the messages in their batch.
        count: messages of the batch.
    """
    if count == 1:
        return {}
    return {"messages": ",".join(map(str, numbers[:NAMED_MAX]))}


def with_code(text: str, word: str, values: Mapping[str, object]) -> str:
    """Return a text followed by a code; pairs without a value (None) are left out.

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
    """Return a value in at most `count_max` characters; a longer one ends in `...`."""
    # A character may be up to twelve characters of percent signs and digits.
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
    """Return the text of a body without its code, and the code; None without one."""
    start = body.rfind(" [", max(0, len(body) - _TAIL_CHARS_MAX))
    found = _CODE.fullmatch(body, start) if start >= 0 else None
    if found is None:
        return body, None
    pairs = (pair.partition("=") for pair in found[2].split())
    values = {name: _decoded(value) for name, _, value in pairs}
    return body[:start], ReplyCode(found[1], values)
