"""Realtime statistics: sums since the last reset, per operation and topic.

MetaQ keeps a third key (partition or consumer group) that no command shows. It is left
out here because a get may name any group, so that clients could exhaust the memory with
counters. For the same reason the number of topics is bounded; a topic beyond the bound
still counts in the total of its operation.

Source: docs/metaq-1.4/broker.md 7.2.
"""

from dataclasses import dataclass
from typing import Final

from metaq.clock import Clock

OPERATIONS: Final = ("put", "get", "offset", "get_miss", "put_failed", "message_size")
"""Operations in the order of `stats realtime`."""

TOPIC_COUNT_MAX: Final = 10_000
"""Maximum number of topics with counters of their own, per operation."""


@dataclass(slots=True)
class _Sample:
    """Count and value of one key since the last reset."""

    count: int = 0
    value: int = 0


class Realtime:
    """The counters of one broker. Used on the loop's thread."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._reset_s = clock.monotonic_s()
        self._totals: dict[str, _Sample] = {}
        self._topics: dict[str, dict[str, _Sample]] = {}

    def record(
        self, operation: str, topic: str, *, count: int = 1, value: int | None = None
    ) -> None:
        """Add samples.

        Args:
            operation: one of OPERATIONS.
            topic: the topic as sent.
            count: number of samples.
            value: sum of their values; None: 1 for each.
        """
        amount = count if value is None else value
        total = self._totals.get(operation)
        if total is None:
            total = self._totals[operation] = _Sample()
        total.count += count
        total.value += amount
        topics = self._topics.setdefault(operation, {})
        sample = topics.get(topic)
        if sample is None:
            if len(topics) >= TOPIC_COUNT_MAX:
                return
            sample = topics[topic] = _Sample()
        sample.count += count
        sample.value += amount

    def describe(self, operation: str) -> str:
        """Return the statistics of an operation on all topics, as in `stats`."""
        total = self._totals.get(operation)
        return "null" if total is None else self._format(total)

    def describe_topic(self, operation: str, topic: str) -> str:
        """Return the statistics of an operation on one topic, as in `stats`."""
        topics = self._topics.get(operation)
        if topics is None:
            return "null"
        sample = topics.get(topic)
        return f"Invalid keyTwo:{topic}" if sample is None else self._format(sample)

    def reset(self) -> None:
        """Set all counters to zero; topics stay listed."""
        self._reset_s = self._clock.monotonic_s()
        for sample in self._totals.values():
            sample.count = sample.value = 0
        for topics in self._topics.values():
            for sample in topics.values():
                sample.count = sample.value = 0

    def _format(self, sample: _Sample) -> str:
        duration_s = int(self._clock.monotonic_s() - self._reset_s)
        return (
            f"Count={sample.count},Value={sample.value},"
            f"Value/Count={_ratio(sample.value, sample.count)},"
            f"Count/Duration={_ratio(sample.count, duration_s)},"
            f"Duration={duration_s}"
        )


def _ratio(dividend: int, divisor: int) -> str:
    """Return a quotient with at most two decimals, as MetaQ writes it."""
    if not divisor:
        return "invalid"
    return f"{dividend / divisor:.2f}".rstrip("0").rstrip(".")
