"""`metaq produce`: put the lines of a file or of standard input as messages."""

import datetime as dt
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import click

from metaq.cli import render
from metaq.cli.cluster import Target, find_topic
from metaq.cli.interrupts import Interrupts
from metaq.cli.options import (
    UTF8,
    ReadWord,
    attribute_option,
    check_tag,
    declared,
    headers_option,
    json_option,
    option,
    put_option,
    takes,
    time_option,
    topic_argument,
)
from metaq.cli.tree import command
from metaq.client import (
    MessageTooLargeError,
    OutcomeUnknownError,
    OutgoingMessage,
    PartlySentError,
    Producer,
    ProducerStatistics,
)
from metaq.errors import ClientError
from metaq.model import HeaderPairs, parse_span

CHUNK_BYTES: Final = 4 * 1024 * 1024
"""Bytes per read: enough for full batches from a file. A pipe returns fewer, which are
sent at once."""
PIECE_BYTES_MAX: Final = 1024 * 1024
PIECE_BYTES_MIN: Final = 4096
STANDARD_INPUT: Final = 0
"""Descriptor of standard input; `sys.stdin` is None if it was closed at the start."""
LINE_BYTES_MAX: Final = 64 * 1024 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class ProduceOptions:
    """The options of `metaq produce`."""

    topic: str = declared(topic_argument)
    file: Path | None = option(
        "--file",
        type=click.Path(exists=True, dir_okay=False, path_type=Path),
        help="Read this file instead of standard input.",
    )
    partition: str | None = declared(put_option("all partitions in turn"))
    attribute: str | None = declared(attribute_option)
    key: str | None = option(
        "--key",
        type=UTF8,
        help="Key of every message; messages of one key go to one partition.",
    )
    key_separator: str | None = option(
        "--key-separator",
        metavar="TEXT",
        help="Text between key and data in each line; a line without it has no key.",
    )
    headers: HeaderPairs = declared(headers_option)
    tag: str | None = declared(
        click.option(
            "--tag",
            type=UTF8,
            help="Tag of every message, for consumers that filter with --where.",
        ),
        default=None,
    )
    delay: float | None = option(
        "--delay",
        type=ReadWord(parse_span),
        metavar="SPAN",
        help="Deliver each line this long after it was read, such as 500ms, 30m or"
        " 1h30m.",
    )
    deliver_at: dt.datetime | None = declared(
        time_option("--at", "Deliver all lines at this time.")
    )
    expires_in: float | None = option(
        "--expires-in",
        type=ReadWord(parse_span),
        metavar="SPAN",
        help="Let consumers skip lines older than this, such as 10s or 1h.",
    )
    as_json: bool = declared(json_option)
    """Print the summary as one object."""


def iter_lines(
    read: Callable[[int], bytes], *, line_bytes_max: int = LINE_BYTES_MAX
) -> Iterator[list[bytes]]:
    """Yield the lines of each chunk read, without line ends.

    A line ends with LF; a CR before it is part of the line, so that `metaq cat`
    restores every byte. Bytes after the last LF form a line.

    Args:
        read: reads at most the given number of bytes; b"" at the end.
        line_bytes_max: maximum length; a longer line raises ClientError.
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


@command(
    "produce",
    takes(ProduceOptions),
    examples=(
        "metaq produce test --file /var/log/syslog",
        "tail -F app.log | metaq produce test --attribute app",
        "echo wake up | metaq produce test --delay 8h",
    ),
)
def produce(target: Target, options: ProduceOptions) -> None:
    """Send each line of standard input or of a file to TOPIC.

    Lines end with LF; all other bytes, including CR, are kept. A file is split into at
    least as many pieces as there are partitions, and the pieces go to all partitions at
    once. Lines that are read from a pipe together go to one partition, the next ones to
    the next partition. The order within a piece is kept. A line whose outcome is
    unknown is sent again; the summary says how many lines may be stored twice.
    """
    if options.key is not None and options.key_separator is not None:
        raise click.UsageError("--key and --key-separator exclude each other")
    if options.key_separator == "":
        raise click.UsageError("--key-separator: expected a text, got an empty one")
    if options.delay is not None and options.deliver_at is not None:
        raise click.UsageError("--delay and --at exclude each other")
    if options.expires_in == 0:
        raise click.UsageError("--expires-in: expected more than 0 s")
    check_tag(options.tag, options.headers)
    wanted = (options.partition,) if options.partition else ()
    found = find_topic(target, options.topic, wanted, kind="puts")
    name = found.partitions[0].name if wanted else None
    with (
        Interrupts() as interrupts,
        open_input(options.file, interrupts) as fd,
        found.target.client() as client,
        client.producer(
            timeout_s=target.timeout_s,
            batch_bytes_max=piece_bytes(os.fstat(fd).st_size, len(found.partitions)),
        ) as producer,
    ):
        started_s = time.monotonic()
        try:
            _send_all(producer, name, options, interrupts, fd)
        finally:
            seconds = time.monotonic() - started_s
            _print_summary(producer.statistics(), seconds, as_json=options.as_json)


def piece_bytes(total_bytes: int, partition_count: int) -> int:
    """Return the size of the pieces, each of which goes to one partition.

    `total_bytes` is 0 for a pipe, whose size is unknown.
    """
    if not total_bytes or partition_count == 1:
        return PIECE_BYTES_MAX
    return min(PIECE_BYTES_MAX, max(PIECE_BYTES_MIN, total_bytes // partition_count))


def _send_all(
    producer: Producer,
    partition: str | None,
    options: ProduceOptions,
    interrupts: Interrupts,
    fd: int,
) -> None:
    done_bytes = line_count = 0

    def read(size: int) -> bytes:
        try:
            with interrupts.pause():
                return os.read(fd, size)
        except OSError as error:
            error.filename = options.file or "standard input"
            raise

    total_bytes = os.fstat(fd).st_size or None
    with render.progress(
        options.topic, total_bytes, is_typing=os.isatty(fd)
    ) as advance:
        for lines in iter_lines(read):
            try:
                send_lines(producer, options, lines, partition)
            except MessageTooLargeError as error:
                longest = max(range(len(lines)), key=lambda n: len(lines[n]))
                number = line_count + longest + 1
                raise ClientError(f"line {number:,}: {error}") from error
            line_count += len(lines)
            done_bytes += sum(map(len, lines)) + len(lines)
            advance(done_bytes)


def send_lines(
    producer: Producer,
    options: ProduceOptions,
    lines: list[bytes],
    partition: str | None,
) -> None:
    """Send lines and wait until they are stored; raise the first error."""
    try:
        producer.send_many(
            options.topic,
            to_messages(options, lines, partition),
            delay=options.delay,
            deliver_at=options.deliver_at,
            expires_in=options.expires_in,
        )
    except PartlySentError as error:
        raise error.__cause__ or error from None


def to_messages(
    options: ProduceOptions, lines: list[bytes], partition: str | None
) -> Sequence[bytes | OutgoingMessage]:
    """Return lines as messages, with attribute, key, headers and tag of the options."""
    if options.key_separator is not None:
        # Bytes of the command line that are not UTF-8 are kept.
        separator = options.key_separator.encode(errors="surrogateescape")
        messages = []
        for line in lines:
            key, found, data = line.partition(separator)
            message = OutgoingMessage(
                data if found else line,
                options.attribute,
                key if found else None,
                partition,
                options.headers,
                options.tag,
            )
            messages.append(message)
        return messages
    added = options.attribute, options.key, partition, options.headers, options.tag
    if added == (None, None, None, (), None):
        return lines
    return [OutgoingMessage(line, *added) for line in lines]


@contextmanager
def open_input(path: Path | None, interrupts: Interrupts) -> Iterator[int]:
    """Yield the descriptor of a file, or of standard input.

    A signal interrupts the open of a named pipe, which waits for a writer.
    """
    if path is None:
        yield STANDARD_INPUT
        return
    with interrupts.pause():
        fd = os.open(path, os.O_RDONLY)
    try:
        yield fd
    finally:
        os.close(fd)


def _print_summary(
    statistics: ProducerStatistics, seconds: float, *, as_json: bool
) -> None:
    message_count = statistics.acknowledged_count
    unknown_count = statistics.failed.get(OutcomeUnknownError.__name__, 0)
    refused_count = sum(statistics.failed.values()) - unknown_count
    by_partition = {
        partition.name: count
        for partition, count in sorted(statistics.by_partition.items())
    }
    rate = message_count / seconds if seconds > 0 else 0.0
    if as_json:
        render.print_json(
            {
                "messages": message_count,
                "bytes": statistics.acknowledged_bytes,
                "seconds": round(seconds, 3),
                "messages_per_s": round(rate),
                "partitions": by_partition,
                "may_be_doubled": statistics.doubtful_count,
                "refused": refused_count,
                "in_doubt": unknown_count,
            }
        )
    else:
        spread = ", ".join(f"{name}: {count:,}" for name, count in by_partition.items())
        click.echo(
            f"{render.count_text(message_count, 'message')},"
            f" {render.bytes_text(statistics.acknowledged_bytes)} in {seconds:.2f} s"
            f" ({rate:,.0f} messages/s); partitions {spread or 'none'}"
        )
    if statistics.doubtful_count:
        render.say(
            f"{render.count_text(statistics.doubtful_count, 'line')} may be stored"
            " twice: they were sent again, because the first outcome was unknown"
        )
    if refused_count:
        render.say(
            f"{render.count_text(refused_count, 'line')} not stored; no later line was"
            " sent"
        )
    if unknown_count:
        render.say(
            f"{render.count_text(unknown_count, 'line')} in doubt: sent, but possibly"
            " not stored"
        )
