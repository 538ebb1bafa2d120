"""`metaq produce`: lines of a file or of standard input become messages."""

import os
import random
import signal
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, TracebackType
from typing import Final, Self

import click

from metaq.cli import render
from metaq.cli.cluster import Target, choose_partitions
from metaq.client.publish import Publisher, PublishStatistics
from metaq.clock import SystemClock
from metaq.errors import ClientError
from metaq.model import TopicPartition
from metaq.record.flags import encode_payload

CHUNK_BYTES: Final = 1024 * 1024
"""What is read at once: with it a file gives full batches; a pipe gives less, and what
it gives is sent without waiting for more."""
STANDARD_INPUT: Final = 0
"""Its descriptor; `sys.stdin` is None when we were started with it closed."""
LINE_BYTES_MAX: Final = 64 * 1024 * 1024
"""A longer line is a file that has no lines."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProduceOptions:
    """The options of the command."""

    topic: str
    """Where to."""
    file: Path | None
    """None is standard input."""
    partition: str | None
    """None goes round all partitions."""
    attribute: str | None
    """Of every message."""
    as_json: bool
    """The summary as one JSON object."""


class Interrupts:
    """Lets Ctrl-C end reading, and nothing else, the first time.

    An exception in the middle of sending would leave half a request on the wire. A
    second Ctrl-C is raised wherever it finds us.
    """

    def __init__(self) -> None:
        self._count = 0
        self._is_reading = False

    def __enter__(self) -> Self:
        # Where somebody ignores the signal, or handles it, it stays so.
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, self._on_signal)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if signal.getsignal(signal.SIGINT) == self._on_signal:
            signal.signal(signal.SIGINT, signal.default_int_handler)

    def _on_signal(self, _number: int, _frame: FrameType | None) -> None:
        self._count += 1
        if self._is_reading or self._count > 1:
            raise KeyboardInterrupt

    def read(self, fd: int, size: int) -> bytes:
        """Read as `os.read`; raise KeyboardInterrupt after the first Ctrl-C."""
        self._is_reading = True
        try:
            if self._count:
                raise KeyboardInterrupt
            return os.read(fd, size)
        finally:
            self._is_reading = False


def iter_lines(
    read: Callable[[int], bytes], *, line_bytes_max: int = LINE_BYTES_MAX
) -> Iterator[list[bytes]]:
    """Yield the lines of each chunk that was read, without their line ends.

    A line ends with LF; a CR before it is part of the line, so that every byte comes
    back from `metaq cat`. Bytes behind the last LF are a line of their own.

    Args:
        read: as `os.read` with the descriptor filled in; b"" at the end.
        line_bytes_max: the longest line.

    Raises:
        ClientError: a line is longer.
    """
    pieces: list[bytes] = []
    size_bytes = 0
    count = 0
    while chunk := read(CHUNK_BYTES):
        head, end, rest = chunk.rpartition(b"\n")
        if not end:
            pieces.append(chunk)
            size_bytes += len(chunk)
        else:
            lines = b"".join((*pieces, head)).split(b"\n")
            yield lines
            count += len(lines)
            pieces, size_bytes = [rest], len(rest)
        if size_bytes > line_bytes_max:
            raise ClientError(
                f"line {count + 1} is longer than {line_bytes_max:,} bytes"
            )
    if size_bytes:
        yield [b"".join(pieces)]


def produce(target: Target, options: ProduceOptions) -> None:
    """Send every line, then print what became of them.

    Raises:
        MetaqError: sending failed; the summary was printed nevertheless.
    """
    cluster = target.read()
    wanted = (options.partition,) if options.partition else ()
    partitions = choose_partitions(cluster, options.topic, cluster.puts, wanted)
    publisher = Publisher(
        cluster,
        producer=uuid.uuid4().hex,
        timeout_s=target.timeout_s,
        clock=SystemClock(),
        sleep=time.sleep,
    )
    started_s = time.monotonic()
    is_interrupted = False
    try:
        with Interrupts() as interrupts:
            try:
                _send_all(publisher, partitions, options, interrupts)
            except KeyboardInterrupt:
                is_interrupted = True
            publisher.flush()
    finally:
        publisher.close()
        seconds = time.monotonic() - started_s
        _print_summary(publisher.statistics(), seconds, as_json=options.as_json)
    if is_interrupted:
        raise KeyboardInterrupt


def _send_all(
    publisher: Publisher,
    partitions: Sequence[TopicPartition],
    options: ProduceOptions,
    interrupts: Interrupts,
) -> None:
    # Many short runs should not all fill the first partition.
    turn = random.randrange(len(partitions))  # noqa: S311  # no secret is made of it
    done_bytes = 0
    with _open_input(options.file) as fd:
        total_bytes = os.fstat(fd).st_size or None
        with render.progress(
            options.topic, total_bytes, is_typing=os.isatty(fd)
        ) as advance:
            for lines in iter_lines(lambda size: interrupts.read(fd, size)):
                payloads, flag = _payloads(lines, options.attribute)
                partition = partitions[turn % len(partitions)]
                publisher.send(partition, payloads, flag=flag)
                turn += 1
                done_bytes += sum(map(len, lines)) + len(lines)
                advance(done_bytes)


@contextmanager
def _open_input(path: Path | None) -> Iterator[int]:
    if path is None:
        yield STANDARD_INPUT
        return
    fd = os.open(path, os.O_RDONLY)
    try:
        yield fd
    finally:
        os.close(fd)


def _payloads(lines: list[bytes], attribute: str | None) -> tuple[list[bytes], int]:
    if attribute is None:
        return lines, 0
    encoded = [encode_payload(line, attribute) for line in lines]
    return [payload for payload, _flag in encoded], encoded[0][1]


def _print_summary(
    statistics: PublishStatistics, seconds: float, *, as_json: bool
) -> None:
    by_partition = {
        f"{p.broker_id}-{p.partition}": count
        for p, count in statistics.by_partition.items()
    }
    rate = statistics.message_count / seconds if seconds > 0 else 0.0
    if as_json:
        render.print_json(
            {
                "messages": statistics.message_count,
                "bytes": statistics.size_bytes,
                "seconds": round(seconds, 3),
                "messages_per_s": round(rate),
                "partitions": by_partition,
                "may_be_doubled": statistics.doubtful_count,
                "refused": statistics.refused_count,
                "unanswered": statistics.in_flight_count,
            }
        )
    else:
        spread = ", ".join(f"{name}: {count:,}" for name, count in by_partition.items())
        click.echo(
            f"{render.count_text(statistics.message_count, 'message')},"
            f" {render.bytes_text(statistics.size_bytes)} in {seconds:.2f} s"
            f" ({rate:,.0f} messages/s); partitions {spread or 'none'}"
        )
    if statistics.doubtful_count:
        render.say(
            f"{render.count_text(statistics.doubtful_count, 'line')} may be stored"
            " twice: the answer to the first sending did not come, so it was repeated"
        )
    if statistics.refused_count:
        render.say(
            f"{render.count_text(statistics.refused_count, 'line')} refused by the"
            " broker; nothing was sent after that"
        )
    if statistics.in_flight_count:
        render.say(
            f"{render.count_text(statistics.in_flight_count, 'line')} got no answer:"
            " outcome unknown"
        )
