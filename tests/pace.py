"""Progress of a long run: a line each minute, and at the end what its end was.

Files differ in length a thousandfold, and the longest begin: the share of tests that
are over, which pytest shows, says little about the time that is left.
"""

import time
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator
from typing import Any

import pytest

EACH_S = 60.0


class Pace:
    """Of workers that run tests side by side, seen by who hands them out."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._test_count = self._file_count = 0
        self._over_count = 0
        self._files: dict[str, str] = {}
        """Worker → file of its last test."""
        self._seen: set[str] = set()
        self._began_s = self._told_s = time.time()
        self._late: deque[tuple[float, float, str, str]] = deque()
        """Tests of the last minute: start, end, worker, file."""

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, ids: list[str]) -> None:
        """Count what there is."""
        self._test_count = len(ids)
        self._file_count = len({_file_of(name) for name in ids})

    def pytest_runtest_logreport(self, report: Any) -> None:
        """Take in what a worker has done."""
        if not hasattr(report, "node"):
            return
        worker, file = report.node.gateway.id, _file_of(report.nodeid)
        self._files[worker] = file
        self._seen.add(file)
        self._over_count += report.when == "call" or not report.passed
        self._late.append((report.start, report.stop, worker, file))
        while self._late[0][1] < report.stop - EACH_S:
            self._late.popleft()
        if report.stop > self._told_s + EACH_S:
            self._told_s = report.stop
            self._tell()

    def _tell(self) -> None:
        running = set(self._files.values())
        self._write(
            # Behind the dots of a line that is not full.
            f"\n{(self._told_s - self._began_s) / 60:.0f} min: "
            f"{len(self._seen - running)} of {self._file_count} files, "
            f"{self._over_count} of {self._test_count} tests; in "
            + ", ".join(sorted(running))
        )

    def pytest_terminal_summary(self) -> None:
        """Tell what each worker did last, if the run was long."""
        if self._told_s == self._began_s:
            return
        end_s = max(stop for _, stop, _, _ in self._late)
        for worker, spent in sorted(_spent(self._late, end_s - EACH_S)):
            self._write(f"{worker} in the last minute: {spent}")

    def _write(self, text: str) -> None:
        reporter: Any = self._config.pluginmanager.get_plugin("terminalreporter")
        if reporter is not None:
            reporter.ensure_newline()
            reporter.write_line(text)


def _spent(
    late: Iterable[tuple[float, float, str, str]], from_s: float
) -> Iterator[tuple[str, str]]:
    """Yield each worker with its three longest files since then."""
    by_worker: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for start_s, stop_s, worker, file in late:
        by_worker[worker][file] += stop_s - max(start_s, from_s)
    for worker, files in by_worker.items():
        longest = sorted(files.items(), key=lambda item: -item[1])[:3]
        yield worker, ", ".join(f"{file} {s:.0f} s" for file, s in longest)


def _file_of(name: str) -> str:
    return name.partition("::")[0]
