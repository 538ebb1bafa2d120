"""`metaq bench`: throughput and latency of the cluster for this client.

Every figure goes through the public client, as a program's messages would. Bodies are
random, so that nothing on the way can compress them.
"""

import os
import struct
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from metaq.cli import render
from metaq.cli.cluster import Found, Target, find_topic
from metaq.client import Client, Consumer, SendFuture
from metaq.client.offsets.offset_store import MemoryOffsets
from metaq.client.options import Start
from metaq.errors import MetaqError, RequestTimeoutError
from metaq.model import Message

COLUMNS: Final = ("figure", "value", "unit")
GROUP: Final = "metaq-bench"
"""Named in gets; nothing is committed for it."""
LIST_BYTES: Final = 4 * 1024 * 1024
"""Bytes given to one `send_many` of `produce`."""
STAMP: Final = struct.Struct(">16sd")
"""Head of a message of `latency`: the run, and the monotonic clock when it was sent."""
PERCENTILES: Final = (50.0, 90.0, 99.0, 99.9, 100.0)
DIGITS: Final = 4
"""Significant digits of figures; larger ones have no decimals."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchOptions:
    """The options of the command."""

    topic: str
    """Target topic; the messages of `produce` and `latency` stay there."""
    count: int
    """Messages in all."""
    as_json: bool
    """One object per figure."""
    size_bytes: int = 0
    """Size of each message, bytes; `latency` takes at least 24."""
    rate: int = 1
    """Messages per second of `latency`."""


Figures = list[tuple[str, float, str]]
"""Name, value and unit of each figure."""


def bench_produce(target: Target, options: BenchOptions) -> None:
    """Print how fast lists are stored, and how long one of them takes."""
    found = find_topic(target, options.topic, (), kind="puts")
    list_count = max(1, LIST_BYTES // max(1, options.size_bytes))
    body = os.urandom(options.size_bytes)
    with (
        found.target.client() as client,
        client.producer(timeout_s=target.timeout_s) as producer,
    ):
        producer.send(options.topic, body)  # connecting is not measured
        started_s = time.monotonic()
        left, before_s, list_s = options.count, started_s, list[float]()
        while left:
            count = min(left, list_count)
            producer.send_many(options.topic, [body] * count)
            left -= count
            now_s = time.monotonic()
            list_s.append(now_s - before_s)
            before_s = now_s
    figures = rates(
        options.count, options.count * options.size_bytes, before_s - started_s
    )
    figures.append(("messages_per_list", min(options.count, list_count), ""))
    figures += percentiles("list_", list_s)
    show(figures, as_json=options.as_json)


def bench_consume(target: Target, options: BenchOptions) -> None:
    """Print how fast a backlog is read, from the start of the logs.

    Raises:
        RequestTimeoutError: there are fewer messages than were asked for.
    """
    count = size_bytes = 0
    found = find_topic(target, options.topic, (), kind="gets")
    with found.target.client() as client:
        with _reading(client, found, "earliest") as consumer:
            _next(consumer, 1, target.timeout_s)  # connections are not measured
        started_s = time.monotonic()
        with _reading(client, found, "earliest") as consumer:
            while count < options.count:
                try:
                    many = _next(consumer, options.count - count, target.timeout_s)
                except RequestTimeoutError as error:
                    raise RequestTimeoutError(
                        f"{error}; {count:,} of {options.count:,} were there: ask for"
                        " fewer with --count"
                    ) from None
                count += len(many)
                size_bytes += sum(len(message.data) for message in many)
            seconds = time.monotonic() - started_s
    show(rates(count, size_bytes, seconds), as_json=options.as_json)


def bench_latency(target: Target, options: BenchOptions) -> None:
    """Print how long messages take from `send` to a consumer that waits.

    They are sent at a steady rate; one that is late makes no other late in the figures,
    because each counts from when it was due.

    Raises:
        RequestTimeoutError: a message did not arrive.
        MetaqError: that was because one could not be sent.
    """
    run, latencies_s, is_over = os.urandom(16), list[float](), threading.Event()
    body = os.urandom(max(0, options.size_bytes - STAMP.size))
    failures: list[MetaqError] = []  # the first one alone
    late: RequestTimeoutError | None = None

    def on_done(future: SendFuture) -> None:
        if not failures and (error := future.exception(0)) is not None:
            failures.append(error)

    found = find_topic(target, options.topic, (), kind="gets", is_partial=True)
    with (
        found.target.client() as client,
        _reading(client, found, "latest") as consumer,
    ):

        def send() -> None:
            with client.producer(timeout_s=target.timeout_s) as producer:
                try:
                    # The search for a partition is not measured.
                    producer.prepare(options.topic)
                    started_s = time.monotonic()
                    for number in range(options.count):
                        due_s = started_s + number / options.rate
                        if is_over.wait(max(0.0, due_s - time.monotonic())):
                            return
                        message = STAMP.pack(run, due_s) + body
                        future = producer.send_nowait(options.topic, message)
                        future.add_done_callback(on_done)
                except MetaqError as error:
                    failures.append(error)

        sender = threading.Thread(target=send, name="metaq-bench")
        sender.start()
        try:
            while len(latencies_s) < options.count:
                for message in _next(consumer, options.count, target.timeout_s):
                    now_s = time.monotonic()
                    if message.data.startswith(run):
                        _run, due_s = STAMP.unpack_from(message.data)
                        latencies_s.append(now_s - due_s)
        except RequestTimeoutError as error:
            late = error
        finally:
            is_over.set()
            sender.join()
    if late is not None:
        raise (failures or [late])[0]
    figures: Figures = [("messages", len(latencies_s), "")]
    figures += percentiles("", latencies_s)
    show(figures, as_json=options.as_json)


def _reading(client: Client, found: Found, start: Start) -> Consumer:
    """Read partitions of one topic, without a group, from a place that is settled."""
    return client.consumer(
        GROUP,
        [found.partitions[0].topic],
        partitions=[each.name for each in found.partitions],
        offsets=MemoryOffsets(),
        start=start,
    )


def _next(consumer: Consumer, count: int, timeout_s: float) -> Sequence[Message]:
    many = consumer.receive_many(max(1, count), timeout_s)
    if not many:
        raise RequestTimeoutError(f"no message came within {timeout_s:g} s")
    return many


def rates(count: int, size_bytes: int, seconds: float) -> Figures:
    """Return the rates of so many messages in so many seconds."""
    seconds = max(seconds, 1e-9)
    return [
        ("messages", count, ""),
        ("seconds", seconds, "s"),
        ("messages_per_s", count / seconds, "1/s"),
        ("mib_per_s", size_bytes / seconds / 2**20, "MiB/s"),
    ]


def percentiles(prefix: str, seconds: Sequence[float]) -> Figures:
    """Return PERCENTILES of times, at least one, in milliseconds."""
    ordered = sorted(seconds)
    return [
        (f"{prefix}p{percentile:g}_ms", percentile_of(ordered, percentile) * 1000, "ms")
        for percentile in PERCENTILES
    ]


def percentile_of(ordered: Sequence[float], percentile: float) -> float:
    """Return the smallest value that so many percent are not above.

    Args:
        ordered: at least one, ascending.
        percentile: above 0, to 100.
    """
    rank = -(-len(ordered) * percentile // 100)
    return ordered[int(rank) - 1]


def rounded(value: float) -> float:
    """Return a figure with DIGITS digits, or as a whole number."""
    if isinstance(value, int) or value >= 10 ** (DIGITS - 1):
        return round(value)
    return float(f"{value:.{DIGITS}g}")


def show(figures: Figures, *, as_json: bool) -> None:
    """Print figures, rounded to `DIGITS`."""
    rows = [(name, rounded(value), unit) for name, value, unit in figures]
    render.print_rows(COLUMNS, rows, as_json=as_json)
