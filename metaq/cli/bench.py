"""`metaq bench`: throughput and latency of the cluster for this client.

All figures are measured through the public client. Payloads are random, so that they
cannot be compressed on the way.
"""

import os
import struct
import threading
import time
from collections.abc import Sequence
from typing import Final

import click

from metaq.cli import render
from metaq.cli.cluster import Found, Target, find_topic
from metaq.cli.options import count_option
from metaq.cli.tree import command, group
from metaq.client import Client, Consumer, MemoryOffsets, SendFuture, Start
from metaq.errors import MetaqError, RequestTimeoutError
from metaq.model import Message

COLUMNS: Final = ("figure", "value", "unit")
GROUP: Final = "metaq-bench"
"""Group in gets; no offset is committed for it."""
LIST_BYTES: Final = 4 * 1024 * 1024
"""Bytes of messages in one `send_many` of `produce`."""
STAMP: Final = struct.Struct(">16sd")
"""Head of a message of `latency`: id of the run, and monotonic time when it was due."""
PERCENTILES: Final = (50.0, 90.0, 99.0, 99.9, 100.0)
DIGITS: Final = 4
"""Significant digits of figures; figures with more digits have no decimals."""


group("bench", "Measure throughput and latency of the cluster from this client.")


topic_option = click.option("--topic", required=True, help="Topic to use.")
size_option = click.option(
    "--size",
    "size_bytes",
    type=click.IntRange(0, 1024 * 1024),
    default=128,
    show_default=True,
    help="Message size in bytes; `latency` sends at least 24.",
)

Figures = list[tuple[str, float, str]]
"""Name, value and unit of each figure."""


@command(
    "bench produce",
    topic_option,
    size_option,
    count_option(500_000),
    examples=("metaq bench produce --topic test --size 128 --count 1000000",),
)
def bench_produce(
    target: Target, topic: str, *, count: int, size_bytes: int, as_json: bool
) -> None:
    """Send messages to a topic; print throughput and latency of batches.

    The messages stay in the topic.
    """
    found = find_topic(target, topic, (), kind="puts")
    list_count = max(1, LIST_BYTES // max(1, size_bytes))
    body = os.urandom(size_bytes)
    with (
        found.target.client() as client,
        client.producer(timeout_s=target.timeout_s) as producer,
    ):
        producer.send(topic, body)  # connecting is not measured
        started_s = time.monotonic()
        left, before_s, list_s = count, started_s, list[float]()
        while left:
            listed = min(left, list_count)
            producer.send_many(topic, [body] * listed)
            left -= listed
            now_s = time.monotonic()
            list_s.append(now_s - before_s)
            before_s = now_s
    figures = rates(count, count * size_bytes, before_s - started_s)
    figures.append(("messages_per_list", min(count, list_count), ""))
    figures += percentiles("list_", list_s)
    show(figures, as_json=as_json)


@command(
    "bench consume",
    topic_option,
    count_option(500_000),
    examples=("metaq bench consume --topic test --count 1000000",),
)
def bench_consume(target: Target, topic: str, *, count: int, as_json: bool) -> None:
    """Read a topic from its start, without a group; print throughput."""
    read_count = size_bytes = 0
    found = find_topic(target, topic, (), kind="gets")
    with found.target.client() as client:
        with _reading(client, found, "earliest") as consumer:
            _next(consumer, 1, target.timeout_s)  # connections are not measured
        started_s = time.monotonic()
        with _reading(client, found, "earliest") as consumer:
            while read_count < count:
                try:
                    many = _next(consumer, count - read_count, target.timeout_s)
                except RequestTimeoutError as error:
                    raise RequestTimeoutError(
                        f"{error}; the topic has {read_count:,} of {count:,} messages:"
                        " use a smaller --count"
                    ) from None
                read_count += len(many)
                size_bytes += sum(len(message.data) for message in many)
            seconds = time.monotonic() - started_s
    show(rates(read_count, size_bytes, seconds), as_json=as_json)


@command(
    "bench latency",
    topic_option,
    size_option,
    count_option(5_000),
    click.option(
        "--rate",
        type=click.IntRange(1),
        default=1000,
        show_default=True,
        help="Messages to send per second.",
    ),
    examples=("metaq bench latency --topic test --rate 5000 --count 50000",),
)
def bench_latency(
    target: Target, topic: str, *, count: int, size_bytes: int, rate: int, as_json: bool
) -> None:
    """Send at a constant rate to a waiting consumer; print latency percentiles.

    Latency is measured from the time when a message was due to be sent until the
    consumer has it, so that the delay of a slow message counts for those that it held
    up, too. The messages stay in the topic.
    """
    run, latencies_s, is_over = os.urandom(16), list[float](), threading.Event()
    body = os.urandom(max(0, size_bytes - STAMP.size))
    failures: list[MetaqError] = []  # only the first one
    late: RequestTimeoutError | None = None

    def on_done(future: SendFuture) -> None:
        if not failures and (error := future.exception(0)) is not None:
            failures.append(error)

    found = find_topic(target, topic, (), kind="gets", is_partial=True)
    with found.target.client() as client, _reading(client, found, "latest") as consumer:

        def send() -> None:
            with client.producer(timeout_s=target.timeout_s) as producer:
                try:
                    # The search for a partition is not measured.
                    producer.prepare(topic)
                    started_s = time.monotonic()
                    for number in range(count):
                        due_s = started_s + number / rate
                        if is_over.wait(max(0.0, due_s - time.monotonic())):
                            return
                        message = STAMP.pack(run, due_s) + body
                        future = producer.send_nowait(topic, message)
                        future.add_done_callback(on_done)
                except MetaqError as error:
                    failures.append(error)

        sender = threading.Thread(target=send, name="metaq-bench")
        sender.start()
        try:
            while len(latencies_s) < count:
                for message in _next(consumer, count, target.timeout_s):
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
    show(figures, as_json=as_json)


def _reading(client: Client, found: Found, start: Start) -> Consumer:
    """Return a consumer of partitions of one topic, without a group."""
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
        raise RequestTimeoutError(f"no message arrived within {timeout_s:g} s")
    return many


def rates(count: int, size_bytes: int, seconds: float) -> Figures:
    """Return the rates for a number of messages, their bytes and the time."""
    seconds = max(seconds, 1e-9)
    return [
        ("messages", count, ""),
        ("seconds", seconds, "s"),
        ("messages_per_s", count / seconds, "1/s"),
        ("mib_per_s", size_bytes / seconds / 2**20, "MiB/s"),
    ]


def percentiles(prefix: str, seconds: Sequence[float]) -> Figures:
    """Return the PERCENTILES, in milliseconds, of at least one time in seconds."""
    ordered = sorted(seconds)
    return [
        (f"{prefix}p{percentile:g}_ms", percentile_of(ordered, percentile) * 1000, "ms")
        for percentile in PERCENTILES
    ]


def percentile_of(ordered: Sequence[float], percentile: float) -> float:
    """Return a percentile (above 0, to 100) by the nearest-rank method.

    The values, at least one, ascend.
    """
    rank = -(-len(ordered) * percentile // 100)
    return ordered[int(rank) - 1]


def rounded(value: float) -> float:
    """Return a figure rounded to DIGITS digits, or to a whole number if it has more."""
    if isinstance(value, int) or value >= 10 ** (DIGITS - 1):
        return round(value)
    return float(f"{value:.{DIGITS}g}")


def show(figures: Figures, *, as_json: bool) -> None:
    """Print figures, rounded to `DIGITS`."""
    rows = [(name, rounded(value), unit) for name, value, unit in figures]
    render.print_rows(COLUMNS, rows, as_json=as_json)
