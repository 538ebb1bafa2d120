"""Delivery times of messages as users give them, and receipts of delayed ones. Pure.

A delay is `"30m"`, seconds or a `timedelta`; a moment is a `datetime` with a time zone.
The delivery time of a delay is rounded up to DUE_STEP_MS, so that messages sent
together have the same time; brokers deliver in longer steps than that.
"""

import datetime as dt
import math
import re
from bisect import bisect_left
from operator import itemgetter
from typing import Any, Final, Self, TypeAlias

from metaq.client.partitioner import parse_partition
from metaq.client.produce.batches import SendResult
from metaq.client.validation import check_seconds, moment_ms, moment_of, wrong_type
from metaq.errors import ConfigError
from metaq.model import MessageId, Millis, Offset, TopicPartition, parse_span
from metaq.record.expiry import EXPIRES_IN
from metaq.record.flags import Headers, list_headers

Span: TypeAlias = str | float | dt.timedelta
"""A duration: text such as `"30m"` or `"1d12h"`, seconds, or a `timedelta`."""

DUE_STEP_MS: Final = 10
"""Delivery times computed from delays are multiples of this."""
ROWS_MS: Final = (3_600_000, 86_400_000, 32 * 86_400_000)
"""Upper bounds of the delays in a row, ms. Brokers keep rows in separate logs, so that
short delays do not occupy the disk for long."""
AT_ONCE: Final = -1
"""Tier of a message whose time had passed: it was delivered at once."""

_TEXT: Final = re.compile(
    r"([^ ]+)/(\d{1,4}-\d{1,9}) (-1|\d{1,9}) (-1|\d{1,19}) (\d{1,14}) (-?\d{1,19})",
    re.ASCII,
)


class Scheduled(SendResult):
    """Receipt of a delayed message, which its broker delivers at its time.

    `str` converts it to text, and `parse` back; `cancel` takes both. `offset` is the
    message's offset in a log of the broker for delayed messages. With a `tier` of -1
    its time had passed, and it was delivered at once, to that offset of its partition;
    if the offset is -1 as well, it went to an exchange, and cannot be cancelled. A
    delayed message gets another id when it is delivered.
    """

    __slots__ = ()

    due_ms: Millis = property(itemgetter(3), doc="Its time, ms since 1970 (UTC).")  # type: ignore[assignment]  # as `NamedTuple` makes its fields

    tier: int = property(itemgetter(4), doc="The part of the broker's log.")  # type: ignore[assignment]  # likewise

    def __new__(
        cls,
        message_id: MessageId,
        partition: TopicPartition,
        offset: Offset,
        due_ms: Millis,
        tier: int,
    ) -> Self:
        """Return the receipt of one message."""
        return tuple.__new__(cls, (message_id, partition, offset, due_ms, tier))

    @property
    def topic(self) -> str:
        """Topic of the message."""
        return self.partition.topic

    @property
    def due(self) -> dt.datetime:
        """Delivery time, in the time zone UTC."""
        return moment_of(self.due_ms)

    @property
    def receipt(self) -> tuple[int, int, int, int]:
        """Identity of the message at its broker: tier, offset, time and id."""
        return self.tier, self.offset, self.due_ms, self.message_id

    @classmethod
    def parse(cls, text: str) -> Self:
        """Return the receipt of a text made by `str`.

        Args:
            text: `TOPIC/BROKER-PARTITION TIER OFFSET TIME ID`.

        Raises:
            ConfigError: the text has another form.
            TypeError: not a str.
        """
        if not isinstance(text, str):
            raise wrong_type("scheduled", "the receipt of a scheduled message", text)
        found = _TEXT.fullmatch(text)
        if found is None:
            raise ConfigError(
                "scheduled: expected 'TOPIC/BROKER-PARTITION TIER OFFSET TIME ID', got"
                f" {text[:80]!r}"
            )
        topic, name = found[1], found[2]
        tier, offset, due_ms, message_id = map(int, found.groups()[2:])
        return cls(
            MessageId(message_id),
            parse_partition(topic, name),
            Offset(offset),
            Millis(due_ms),
            tier,
        )

    def __str__(self) -> str:
        return (
            f"{self.partition} {self.tier} {self.offset} {self.due_ms}"
            f" {self.message_id}"
        )

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self}, due {self.due.isoformat()}>"


def span_s(name: str, value: object, *, may_be_zero: bool = True) -> float:
    """Return a duration given by the user, in seconds.

    Args:
        name: name of the argument, for the error.
        value: a `Span`.
        may_be_zero: whether 0 is allowed.

    Raises:
        ConfigError: the text is not a duration, or the duration is out of range.
        TypeError: a value of another type.
    """
    if isinstance(value, str):
        try:
            value = parse_span(value)
        except ValueError as error:
            raise ConfigError(f"{name}: {error}") from None
    elif isinstance(value, dt.timedelta):
        value = value.total_seconds()
    elif isinstance(value, bool) or not isinstance(value, int | float):
        wanted = "seconds, a text such as '30m', or a timedelta"
        raise wrong_type(name, wanted, value)
    check_seconds(name, value, may_be_zero=may_be_zero)
    seconds: Any = value
    return float(seconds)


def due_of(now_ms: Millis, delay: object, deliver_at: object) -> Millis | None:
    """Return the delivery time of a message, ms since 1970; None for at once.

    Args:
        now_ms: the current time.
        delay: as given by the user; None for none.
        deliver_at: likewise.

    Raises:
        ConfigError: both are given, the moment has no time zone, or the delay is not a
            duration.
        TypeError: one has another type.
    """
    if deliver_at is None:
        if delay is None:
            return None
        due_ms = now_ms + math.ceil(span_s("delay", delay) * 1000)
        return Millis(-(-due_ms // DUE_STEP_MS) * DUE_STEP_MS)
    if delay is not None:
        raise ConfigError("delay, deliver_at: expected one of them, got both")
    return moment_ms("deliver_at", deliver_at)


def delay_row(delay_ms: int) -> int:
    """Return the index in ROWS_MS of a delay; a batch has delays of one row only."""
    return bisect_left(ROWS_MS, delay_ms)


def with_expiry(headers: Headers, expires_in: object) -> Headers:
    """Return headers with the one for the expiry of a message; None adds none.

    Raises:
        ConfigError, TypeError: `expires_in` is not a duration above 0; or as
            `list_headers`.
    """
    if expires_in is None:
        return headers
    seconds = span_s("expires_in", expires_in, may_be_zero=False)
    pair = EXPIRES_IN, str(math.ceil(seconds * 1000)).encode()
    return (*(list_headers(headers) if headers else ()), pair)
