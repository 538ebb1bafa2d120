"""Publish real log lines, read every partition back, and compare byte for byte.

    python examples/demo.py [FILE...]

Starts `metaq local` on free ports in a temporary directory. Without files it takes the
machine's own logs, and follows the logs that ZooKeeper and the broker write meanwhile.
The lines of one file go to one partition, with the file's name as their attribute, so
each partition has exactly one right content: the lines in the order they were sent,
each of them once. Spark then archives them to Parquet, counts them by level and
component, and audits the archive. Removes everything it made; the exit code is 0 when
all was right.
"""

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, Final

from metaq.client.browser import TopicBrowser
from metaq.client.discovery import Cluster, ZooKeeperSource
from metaq.client.publish import Publisher
from metaq.clock import SystemClock
from metaq.errors import MetaqError
from metaq.model import Offset, TopicPartition
from metaq.record.flags import encode_payload
from metaq.zk.paths import NodePaths

# Beside this file; a test that runs it by its path does not have the directory.
sys.path.insert(0, str(Path(__file__).parent))
from demo_spark import run_pipeline  # see above

TOPIC: Final = "demo"
PARTITIONS: Final = 4
LOGS: Final = Path("/var/log")
FILES_MAX: Final = 100
BYTES_MAX: Final = 32 * 1024 * 1024
"""What is published at most: it is kept in memory for the comparison."""
CHUNK_BYTES: Final = 1024 * 1024
PROBE_BYTES: Final = 4096
START_TIMEOUT_S: Final = 90.0
STOP_TIMEOUT_S: Final = 20.0
TIMEOUT_S: Final = 20.0
COMPRESSED: Final = {".gz", ".xz", ".bz2", ".zst"}

Line = tuple[str, bytes]
"""Name of the file, and one line of it without its line end."""


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
        """What its lines carry as their attribute."""
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


# -- publishing and comparing ---------------------------------------------------------


@dataclass
class Sent:
    """Everything that was sent, per partition, in order."""

    lines: dict[TopicPartition, list[Line]] = field(default_factory=dict)
    size_bytes: int = 0

    @property
    def count(self) -> int:
        """Lines in all."""
        return sum(map(len, self.lines.values()))

    @property
    def has_room(self) -> bool:
        """Whether more may be sent."""
        return self.size_bytes < BYTES_MAX


class Feed:
    """Sends the lines of sources, each to the partition of its source."""

    def __init__(self, publisher: Publisher, partitions: Sequence[TopicPartition]):
        self._publisher = publisher
        self._partitions = partitions
        self._chosen: dict[Path, TopicPartition] = {}
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
        turn = len(self._chosen) % len(self._partitions)
        partition = self._chosen.setdefault(source.path, self._partitions[turn])
        encoded = [encode_payload(line, source.name) for line in lines]
        payloads = [payload for payload, _flag in encoded]
        self._publisher.send(partition, payloads, flag=encoded[0][1])
        kept = self.sent.lines.setdefault(partition, [])
        kept += [(source.name, line) for line in lines]
        self.sent.size_bytes += sum(map(len, lines))


def compare(
    partition: TopicPartition, wanted: Sequence[Line], got: Sequence[Line]
) -> str | None:
    """Return what is wrong with a partition; None when it is exactly what was sent."""
    for number, (want, have) in enumerate(zip(wanted, got, strict=False)):
        if want != have:
            return f"{partition}: line {number} should be {want!r}, but is {have!r}"
    if len(wanted) != len(got):
        return f"{partition}: {len(wanted)} lines were sent, {len(got)} came back"
    return None


def read_back(browser: TopicBrowser, partition: TopicPartition) -> list[Line]:
    """Return all lines of a partition, in the order of the log."""
    return [
        (message.attribute or "", message.data)
        for messages in browser.read(partition, Offset(0))
        for message in messages
    ]


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
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            if process.stdout is not None:
                process.stdout.close()


def wait_for_line(stream: BinaryIO, process: "subprocess.Popen[bytes]") -> str:
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


def publish(cluster: Cluster, files: Sequence[Source], live: Sequence[Source]) -> Sent:
    """Send all files, and what the live logs gain meanwhile."""
    publisher = Publisher(
        cluster,
        producer=f"demo-{os.getpid()}",
        timeout_s=TIMEOUT_S,
        clock=SystemClock(),
        sleep=time.sleep,
    )
    feed = Feed(publisher, cluster.partitions(TOPIC, cluster.puts))
    try:
        for source in files:
            feed.pump(source)
            for each in live:
                feed.pump(each)
        publisher.flush()
    finally:
        publisher.close()
    return feed.sent


def run(paths: Sequence[Path], logs: Path = LOGS) -> int:
    """Tell the whole story; return the exit code."""
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
            archive = Path(directory) / "archive"
            return tell(local["zookeeper"], files, sources, archive)


def tell(zookeeper: str, files: list[Source], live: list[Source], archive: Path) -> int:
    """Publish, read back, compare, archive with Spark, and say so."""
    clock = SystemClock()
    cluster = ZooKeeperSource(zookeeper, NodePaths(), clock).read(timeout_s=TIMEOUT_S)
    also = f" and {len(live)} logs that are being written" if live else ""
    print(f"Publishing {len(files)} files{also} to {PARTITIONS} partitions ...")
    sys.stdout.flush()
    started_s = time.monotonic()
    sent = publish(cluster, files, live)
    seconds = time.monotonic() - started_s
    print_rate("put, each one synced to disk before it was acknowledged", sent, seconds)
    if not sent.has_room:
        print(f"  (stopped at {BYTES_MAX // 2**20} MiB)")
    if sent.count == 0:
        raise DemoError("there was no line to publish; name a file with lines")
    print("Reading every partition back ...", flush=True)
    started_s = time.monotonic()
    with TopicBrowser(cluster, timeout_s=TIMEOUT_S, clock=clock) as browser:
        partitions = cluster.partitions(TOPIC, cluster.gets)
        back = {partition: read_back(browser, partition) for partition in partitions}
    print_rate("read", sent, time.monotonic() - started_s)
    faults = []
    for partition, got in back.items():
        fault = compare(partition, sent.lines.get(partition, []), got)
        names = Counter(name for name, _line in got)
        verdict = "WRONG" if fault else "each once, in order, byte for byte"
        print(f"  {partition}: {len(got):,} lines of {len(names)} files: {verdict}")
        faults += [fault] if fault else []
    if faults:
        raise DemoError("; ".join(faults))
    run_pipeline(zookeeper, TOPIC, archive, sent.count)
    print_next_steps()
    return 0


def print_rate(what: str, sent: Sent, seconds: float) -> None:
    """Print how much, how long, how fast."""
    rate = sent.count / max(seconds, 1e-6)
    size = f"{sent.count:,} lines, {sent.size_bytes / 2**20:.1f} MiB"
    print(f"  {size} {what}: {seconds:.2f} s, {rate:,.0f} lines/s", flush=True)


def print_next_steps() -> None:
    """Say where to look next."""
    print("""All right. Where to look next:
  .venv/bin/metaq local                  the same, to stay: prints where it listens
  .venv/bin/metaq produce test           type lines; Ctrl-D ends
  .venv/bin/metaq cat test --follow      watch them arrive in another window
  .venv/bin/metaq pipeline --help        jobs on Spark, as the last step above
  .venv/bin/metaq --help                 topics, stats, verify, dump and the rest
  README.md, ARCHITECTURE.md, docs/      guarantees, how it works, every byte""")


def main() -> int:
    """Run as a program."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("files", nargs="*", type=Path, metavar="FILE")
    paths: list[Path] = parser.parse_args().files
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
