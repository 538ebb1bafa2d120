"""The messages that figures send: lines of real logs, and as many of one length.

    python -m bench.lines [FILE ...]        prints source, mean and spread of the lines

The lines come from the named files, or from the machine's own logs, found and read as
by `scripts/demo`. They are taken from all files in turn, as by a collector of several
logs, so that lengths vary from message to message. On a machine with too few lines they
are generated, the same everywhere, with lengths distributed as in log files.
"""

import random
import statistics
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, cycle, islice, zip_longest
from pathlib import Path

from examples.demo import LOGS, Source, find_logs

COUNT = 8000
"""Number of lines, which are sent repeatedly."""
COUNT_MIN = 2000
"""Minimum number of lines in the machine's own logs."""
LINE_BYTES_MAX = 4096
"""Longer lines are left out, because one would dominate the mean of a few thousand."""
FILE_BYTES_MAX = 1 << 20
"""Maximum bytes read of each file."""
MEAN_BYTES, SPREAD_BYTES = 150, 80
"""Mean and standard deviation of the log-normal lengths of generated lines."""
LOG_MEAN, LOG_SPREAD = 4.885, 0.50
"""Mean and standard deviation of the logarithms of these lengths."""
WORDS = (
    "accepted", "block", "cache", "closed", "connection", "error", "failed", "for",
    "INFO", "instance", "node", "packet", "port", "received", "request", "response",
    "session", "size", "started", "status", "stopped", "task", "time", "to", "user",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Payloads:
    """`COUNT` messages to send repeatedly."""

    data: list[bytes]
    source: str

    @property
    def mean_bytes(self) -> float:
        """Mean length of the messages."""
        return statistics.fmean(map(len, self.data))

    def of_one_length(self) -> "Payloads":
        """Return as many lines, each cut or repeated to the mean length.

        They are different objects, as lines are: a single one would stay in the
        processor's cache.
        """
        size = round(self.mean_bytes)
        data = [(line * (size // len(line) + 1))[:size] for line in self.data]
        return Payloads(data, f"{size} bytes each")

    def repeat(self, count: int) -> list[bytes]:
        """Return `count` messages."""
        return list(islice(cycle(self.data), count))

    def __str__(self) -> str:
        sizes = [len(one) for one in self.data]
        return (
            f"{len(sizes):,} lines of {self.source}: mean {self.mean_bytes:.0f} B, "
            f"spread {statistics.pstdev(sizes):.0f} B, {min(sizes)} to {max(sizes)} B"
        )


def find_lines(paths: Sequence[Path] = ()) -> Payloads:
    """Return lines of these files; without files, of the machine's logs or generated.

    Raises:
        ValueError: the named files have no usable line.
    """
    found = list(islice(_lines_of(paths or find_logs(LOGS)), COUNT))
    if paths and not found:
        raise ValueError(
            f"no line of 1 to {LINE_BYTES_MAX} bytes in {len(paths)} files"
        )
    if not paths and len(found) < COUNT_MIN:
        return Payloads(list(islice(make_lines(), COUNT)), "a generator")
    source = f"{len(paths)} files" if paths else "the machine's own logs"
    return Payloads(list(islice(cycle(found), COUNT)), source)


def _lines_of(paths: Sequence[Path]) -> Iterator[bytes]:
    files = [Source(path).read(FILE_BYTES_MAX) for path in paths]
    for line in chain.from_iterable(zip_longest(*files, fillvalue=b"")):
        if 0 < len(line) <= LINE_BYTES_MAX:
            yield line


def make_lines() -> Iterator[bytes]:
    """Yield generated lines without end, with lengths distributed as in logs."""
    chance = random.Random(1)
    for number in cycle(range(86_400)):
        size = int(min(max(chance.lognormvariate(LOG_MEAN, LOG_SPREAD), 40), 2500))
        line = (
            f"2026-01-01 {number // 3600:02}:{number // 60 % 60:02}:{number % 60:02},"
        )
        while len(line) < size:
            line += f" {chance.choice(WORDS)} {chance.randrange(100_000)}"
        yield line[:size].encode()


if __name__ == "__main__":
    print(find_lines([Path(word) for word in sys.argv[1:]]))
