"""Publish real log lines, consume them in a group, kill a consumer, miss nothing.

    python examples/demo.py [FILE...]

Starts `metaq local` on free ports in a temporary directory. Without files it takes the
machine's own logs, and the logs that ZooKeeper and the broker write in that time. The
lines of one file go to one partition, with the file's name as their attribute. Two
processes then read them as members of one group, and one is killed half way: the other
takes over, and every line that was sent has arrived, byte for byte. Spark then archives
them to a Delta table, counts them by level and component, and audits the archive.
Removes everything it made; the exit code is 0 when all was right.
"""

import argparse
import logging
import os
import signal
import subprocess
import sys
import tempfile
import time
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Final

from metaq.cli import render
from metaq.client import Client, OutgoingMessage, Producer
from metaq.errors import MetaqError
from metaq.model import TopicPartition

# Beside this file; a test that runs it by its path does not have the directory.
sys.path.insert(0, str(Path(__file__).parent))
from demo_spark import run_pipeline  # see above

TOPIC: Final = "demo"
GROUP: Final = "demo"
PARTITIONS: Final = 4
LOGS: Final = Path("/var/log")
FILES_MAX: Final = 100
BYTES_MAX: Final = 32 * 1024 * 1024
"""Most messages that are published: their checksums are kept in memory."""
CHUNK_BYTES: Final = 1024 * 1024
PROBE_BYTES: Final = 4096
START_TIMEOUT_S: Final = 90.0
STOP_TIMEOUT_S: Final = 20.0
TIMEOUT_S: Final = 20.0
READ_TIMEOUT_S: Final = 60.0
SESSION_TIMEOUT_S: Final = 4.0
"""Time that the partitions of the consumer that is killed wait for the other."""
MEMBERS: Final = 2
READING_S: Final = 1.0
"""Time that one member would read for all: fast enough, and slow enough to kill it."""
COMMIT_INTERVAL_S: Final = 0.2
COMPRESSED: Final = {".gz", ".xz", ".bz2", ".zst"}

Place = tuple[str, int]
"""Place of a line: partition and offset."""


class DemoError(Exception):
    """Something went wrong; the message is for the person who watches."""


# -- what is published ----------------------------------------------------------------


@dataclass
class Source:
    """A log file that is read line by line, also while it is being written."""

    path: Path
    is_live: bool = False
    position: int = 0
    rest: bytes = b""

    @property
    def name(self) -> str:
        """Attribute of its lines."""
        return self.path.name

    def read(self, size_max: int) -> list[bytes]:
        """Return the next whole lines; of a file that is complete, the last one too."""
        with self.path.open("rb") as file:
            file.seek(self.position)
            data = file.read(size_max)
        self.position += len(data)
        *lines, self.rest = (self.rest + data).split(b"\n")
        if not data and self.rest and not self.is_live:
            lines, self.rest = [self.rest], b""
        return lines


def find_logs(directory: Path) -> list[Path]:
    """Return the text files below a directory that may be read, smallest first."""
    found = []
    for root, _directories, names in os.walk(directory):
        for name in names:
            path = Path(root) / name
            try:
                if not path.is_symlink() and path.is_file() and is_text(path):
                    found.append((path.stat().st_size, path))
            except OSError:
                continue
    return [path for _size, path in sorted(found)][:FILES_MAX]


def is_text(path: Path) -> bool:
    """Return whether a file has bytes, and those at its start are text."""
    if path.suffix in COMPRESSED:
        return False
    with path.open("rb") as file:
        start = file.read(PROBE_BYTES)
    return bool(start) and b"\0" not in start


# -- publishing ----------------------------------------------------------------------


@dataclass
class Sent:
    """Everything that was sent: the checksum of each line, by its place."""

    checks: dict[Place, int] = field(default_factory=dict)
    size_bytes: int = 0

    @property
    def count(self) -> int:
        """Lines in all."""
        return len(self.checks)

    @property
    def has_room(self) -> bool:
        """Whether more may be sent."""
        return self.size_bytes < BYTES_MAX


class Feed:
    """Sends the lines of sources, each to the partition of its source."""

    def __init__(self, producer: Producer, partitions: Sequence[TopicPartition]):
        self._producer = producer
        self._names = [partition.name for partition in partitions]
        self._chosen: dict[Path, str] = {}
        self.sent = Sent()

    def pump(self, source: Source) -> bool:
        """Send what a source has; return whether it had anything."""
        has_sent = False
        while self.sent.has_room:
            position = source.position
            lines = source.read(CHUNK_BYTES)
            if lines:
                self._send(source, lines)
                has_sent = True
            elif source.position == position:
                break
        return has_sent

    def _send(self, source: Source, lines: list[bytes]) -> None:
        turn = len(self._chosen) % len(self._names)
        partition = self._chosen.setdefault(source.path, self._names[turn])
        messages = [OutgoingMessage(n, source.name, None, partition) for n in lines]
        results = self._producer.send_many(TOPIC, messages)
        for line, result in zip(lines, results, strict=True):
            self.sent.checks[partition, result.offset] = check_of(source.name, line)
        self.sent.size_bytes += sum(map(len, lines))


def check_of(name: str | None, line: bytes) -> int:
    """Return a checksum of a line and of the file it is from."""
    return zlib.crc32(line, zlib.crc32((name or "").encode()))


# -- a consumer, in a process of its own ----------------------------------------------


def run_member(zookeeper: str, output: Path, lines_per_s: float) -> int:
    """Read as a member of the group, and note each line, until the process is ended.

    A line counts as handled when the next ones are asked for; it is in the file by
    then, so all that was committed was noted.
    """
    signal.signal(signal.SIGTERM, lambda _number, _frame: sys.exit(0))
    logging.basicConfig(filename=output.with_suffix(".log"), level=logging.INFO)
    count_max = max(1, int(lines_per_s / 20))
    with (
        output.open("ab", buffering=0) as file,
        Client(zookeeper, session_timeout_s=SESSION_TIMEOUT_S) as client,
        client.consumer(
            GROUP, [TOPIC], commit_interval_s=COMMIT_INTERVAL_S
        ) as consumer,
    ):
        while True:
            many = consumer.receive_many(count_max, TIMEOUT_S)
            notes = [
                b"%s %d %d\n"
                % (
                    m.partition.name.encode(),
                    m.offset,
                    check_of(m.attribute, m.data),
                )
                for m in many
            ]
            file.write(b"".join(notes))
            time.sleep(len(many) / lines_per_s)


@contextmanager
def member(
    zookeeper: str, output: Path, lines_per_s: float
) -> "Iterator[subprocess.Popen[bytes]]":
    """Run a consumer as a process; end it with the block."""
    output.touch()
    words = ["--member", str(output), zookeeper, str(lines_per_s)]
    process = subprocess.Popen(  # noqa: S603  # no shell, our own words
        [sys.executable, __file__, *words]
    )
    try:
        yield process
    finally:
        end(process)


def end(process: "subprocess.Popen[bytes]") -> None:
    """Ask a process to end, and make it."""
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def read_notes(path: Path) -> list[tuple[Place, int]]:
    """Return place and checksum of what a consumer has noted, in its order."""
    found = []
    # The last note of a process that was killed may be half a line.
    for line in path.read_bytes().split(b"\n")[:-1]:
        partition, offset, check = line.split(b" ")
        found.append(((partition.decode(), int(offset)), int(check)))
    return found


@dataclass(frozen=True)
class Arrivals:
    """Fate of the lines."""

    missing: int
    """Sent, and not arrived."""
    wrong: int
    """Arrived with other bytes, or never sent."""
    doubled: int
    """Arrived more than once: how often too many."""


def compare(wanted: Mapping[Place, int], got: Iterable[tuple[Place, int]]) -> Arrivals:
    """Compare what was sent with what arrived."""
    counts = Counter(got)
    right = sum(wanted.get(place) == check for place, check in counts)
    return Arrivals(
        missing=len(wanted) - right,
        wrong=len(counts) - right,
        doubled=counts.total() - len(counts),
    )


# -- metaq local ----------------------------------------------------------------------


@contextmanager
def metaq_local(directory: Path) -> Iterator[dict[str, str]]:
    """Run `metaq local`; give what its one line says, and the name of its log."""
    log = directory / "broker.log"
    command = [
        sys.executable, "-m", "metaq", "local", "--port", "0", "--zk-port", "0",
        "--data-dir", str(directory / "data"), "--topic", f"{TOPIC}={PARTITIONS}",
    ]  # fmt: skip
    with log.open("wb") as errors:
        process = subprocess.Popen(  # noqa: S603  # no shell, our own words
            command, stdout=subprocess.PIPE, stderr=errors
        )
        try:
            assert process.stdout is not None
            line = wait_for_line(process.stdout, process)
            if not line.startswith("ready "):
                tail = log.read_text(errors="replace").strip().splitlines()[-1:]
                raise DemoError("metaq local did not start: " + "".join(tail))
            pairs = (word.partition("=")[::2] for word in line.split()[1:])
            yield {"log": str(log), **dict(pairs)}
        finally:
            end(process)
            if process.stdout is not None:
                process.stdout.close()


def wait_for_line(stream: IO[bytes], process: "subprocess.Popen[bytes]") -> str:
    """Return the first line, "" when the process ends or takes too long."""
    os.set_blocking(stream.fileno(), False)
    deadline_s = time.monotonic() + START_TIMEOUT_S
    data = b""
    while time.monotonic() < deadline_s and b"\n" not in data:
        data += stream.read() or b""
        if process.poll() is not None:
            break
        time.sleep(0.02)
    return data.partition(b"\n")[0].decode()


# -- the story ------------------------------------------------------------------------


def publish(client: Client, files: Sequence[Source], live: Sequence[Source]) -> Sent:
    """Send all files, and what the live logs gain in that time."""
    with client.producer(timeout_s=TIMEOUT_S) as producer:
        feed = Feed(producer, client.partitions(TOPIC))
        for source in files:
            feed.pump(source)
            for each in live:
                feed.pump(each)
    return feed.sent


def run(paths: Sequence[Path], logs: Path = LOGS) -> int:
    """Run the whole demo; return the exit code."""
    files = [Source(path) for path in paths or find_logs(logs)]
    with tempfile.TemporaryDirectory(prefix="metaq-demo-") as directory:
        print("Starting ZooKeeper and a broker ...", flush=True)
        started_s = time.monotonic()
        with metaq_local(Path(directory)) as local:
            seconds = time.monotonic() - started_s
            print(f"  {local['broker']}, ZooKeeper {local['zookeeper']}", end="")
            print(f", ready after {seconds:.1f} s", flush=True)
            being_written = (
                Path(local["log"]),
                Path(local["data"]) / "local" / "zookeeper" / "zookeeper.log",
            )
            live = [] if paths else [p for p in being_written if p.exists()]
            sources = [Source(path, is_live=True) for path in live]
            return run_demo(local["zookeeper"], files, sources, Path(directory))


def run_demo(
    zookeeper: str, files: list[Source], live: list[Source], place: Path
) -> int:
    """Publish, consume, kill, compare, archive with Spark, and say so."""
    also = f" and {len(live)} logs that are being written" if live else ""
    count = render.count_text(len(files), "file")
    print(f"Publishing {count}{also} to {PARTITIONS} partitions ...")
    sys.stdout.flush()
    started_s = time.monotonic()
    with Client(zookeeper) as client:
        sent = publish(client, files, live)
    seconds = time.monotonic() - started_s
    print_rate("put, each one synced to disk before it was acknowledged", sent, seconds)
    if not sent.has_room:
        print(f"  (stopped at {BYTES_MAX // 2**20} MiB)")
    if sent.count == 0:
        raise DemoError("there was no line to publish; name a file with lines")
    arrived = consume(zookeeper, sent, place)
    print(f"  {sent.count - arrived.missing:,} of {sent.count:,} lines arrived", end="")
    print(", byte for byte")
    if arrived.doubled:
        print(f"  {arrived.doubled:,} of them came twice: the consumer that was killed")
        print("  had read them, and did not live to commit that it had")
    if arrived.missing or arrived.wrong:
        raise DemoError(
            f"{arrived.missing} lines are missing, {arrived.wrong} came wrong"
        )
    run_pipeline(zookeeper, TOPIC, place / "archive", sent.count)
    print_next_steps()
    return 0


def consume(zookeeper: str, sent: Sent, place: Path) -> Arrivals:
    """Read with two consumers of one group, and kill one of them half way."""
    print(f"Reading with {MEMBERS} consumers of one group ...", flush=True)
    outputs = [place / f"member-{number}" for number in range(MEMBERS)]
    lines_per_s = sent.count / READING_S
    with (
        member(zookeeper, outputs[0], lines_per_s) as first,
        member(zookeeper, outputs[1], lines_per_s) as second,
    ):
        wait_for(outputs, sent, (sent.count + 1) // 2)
        notes = [read_notes(output) for output in outputs]
        shares = [len(each) for each in notes]
        unread = [count_unread(sent, each) for each in notes]
        at = unread.index(max(unread))
        (first, second)[at].kill()
        killed_s = time.monotonic()
        print(f"  {shares[0]:,} and {shares[1]:,} lines read; kill -9 of the", end="")
        print(f" {('first', 'second')[at]} one", flush=True)
        found = wait_for(outputs, sent, sent.count)
        seconds = time.monotonic() - killed_s
        print(
            f"  the other one has taken over and read the rest: {seconds:.1f} s", end=""
        )
        print(f", {SESSION_TIMEOUT_S:g} of them ZooKeeper's session time-out")
    return compare(sent.checks, found)


def count_unread(sent: Sent, notes: Sequence[tuple[Place, int]]) -> int:
    """Return how much is left of the partitions that a consumer has read from."""
    names = {partition for (partition, _offset), _check in notes}
    return sum(partition in names for partition, _offset in sent.checks) - len(notes)


def wait_for(
    outputs: Sequence[Path], sent: Sent, count: int
) -> list[tuple[Place, int]]:
    """Return what was noted, as soon as so many of the lines are among it, or late."""
    deadline_s = time.monotonic() + READ_TIMEOUT_S
    while True:
        found = [note for output in outputs for note in read_notes(output)]
        if len({place for place, _check in found}) >= count:
            return found
        if time.monotonic() > deadline_s:
            missing = compare(sent.checks, found).missing
            raise DemoError(f"{missing} lines did not arrive in {READ_TIMEOUT_S:g} s")
        time.sleep(0.05)


def print_rate(what: str, sent: Sent, seconds: float) -> None:
    """Print how much, how long, how fast."""
    rate = sent.count / max(seconds, 1e-6)
    size = f"{sent.count:,} lines, {sent.size_bytes / 2**20:.1f} MiB"
    print(f"  {size} {what}: {seconds:.2f} s, {rate:,.0f} lines/s", flush=True)


def print_next_steps() -> None:
    """Say where to look next."""
    print("""All right. Where to look next:
  .venv/bin/metaq local                    the same, to stay: it takes a terminal
  .venv/bin/metaq produce test             in another: type lines; Ctrl-D ends
  .venv/bin/metaq consume test --group g   watch them arrive, in several more
  .venv/bin/metaq groups g                 who reads what, and with which lag
  .venv/bin/metaq pipeline --help          jobs on Spark, as the last step above
  .venv/bin/metaq --help                   topics, stats, verify, dump and the rest
  README.md, ARCHITECTURE.md, docs/        guarantees, how it works, every byte""")


def main() -> int:
    """Run as a program."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("files", nargs="*", type=Path, metavar="FILE")
    parser.add_argument("--member", nargs=3, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.member is not None:
        output, zookeeper, lines_per_s = arguments.member
        return run_member(zookeeper, Path(output), float(lines_per_s))
    paths: list[Path] = arguments.files
    # The default would end us without the clean-up below.
    signal.signal(signal.SIGTERM, lambda _number, _frame: sys.exit(143))
    try:
        for path in paths:
            path.open("rb").close()
        return run(paths)
    except (DemoError, MetaqError, OSError) as error:
        print(f"demo: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
