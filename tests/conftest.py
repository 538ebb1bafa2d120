"""Fixtures for every test: one printed seed, a data directory, no leaks."""

import atexit
import contextlib
import gc
import itertools
import os
import random
import re
import signal
from collections import defaultdict
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

import hypothesis
import pytest
from _pytest.runner import runtestprotocol
from xdist.scheduler import LoadFileScheduling

from tests.brokers import BROKERS, METAQ_1_4, AnyBroker, StartBroker, broker_of
from tests.pace import Pace
from tests.rigs.zookeeper import use_quiet_server
from tests.sampling import IS_QUICK, SEED, examples, is_omitted, unchosen

ROOT = Path(__file__).parents[1]
EXAMPLES_MAX = examples(50)
LONG_MARKS = {"slow": 1, "zookeeper": 1, "crash": 1, "spark": 2}
"""Marks of tests that take long, and how much each one weighs."""

LATE_WORKER = "Python worker failed to connect back"
"""Spark's word when a Python of its own takes 10 s to begin, as on a busy machine: it
waits no longer, and no setting of it says otherwise."""
LATE_WORKER_TRIES = 3
TOLD_S = 0.1
"""Setups and teardowns longer than this may be among the slowest of a run."""

hypothesis.settings.register_profile(
    "metaq",
    derandomize=False,
    deadline=None,
    database=None,
    max_examples=EXAMPLES_MAX,
    print_blob=True,
)
hypothesis.settings.load_profile("metaq")


def pytest_configure(config: pytest.Config) -> None:
    """Set what all tests inherit: a seed, if the command line brings none; SIGINT."""
    if getattr(config.option, "hypothesis_seed", None) is None:
        config.option.hypothesis_seed = str(SEED)
    if config.option.dist != "no":
        config.pluginmanager.register(Pace(config))
    use_quiet_server()
    # What is frozen when Python ends is not freed, and duckdb says so.
    config.add_cleanup(gc.unfreeze)
    if IS_QUICK and hasattr(config, "workerinput"):
        # It has told all: to take apart what it imported is a second of each worker.
        atexit.register(os._exit, 0)
    # Behind a shell's `&` it is ignored, and children of tests inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """Import no file, and no PySpark for it, of which a quick run has nothing."""
    is_test = collection_path.match("test_*.py")
    return (IS_QUICK and is_test and is_omitted(collection_path.read_text())) or None


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Collect tests without collecting garbage: there is none, and it is looked for.

    Nor is there any among the tests, later: they stay until the end.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(
    config: pytest.Config, items: list[pytest.Item]
) -> None:
    """Choose what a run tries of what was asked for, and begin with the longest files.

    Those run side by side end together.
    """
    left_out = unchosen(items)
    config.hook.pytest_deselected(items=[*left_out])
    items[:] = [item for item in items if item not in left_out]
    weights: dict[Path, int] = defaultdict(int)
    slow_counts: dict[Path, int] = defaultdict(int)
    for item in items:
        marks = {mark.name for mark in item.iter_markers()} & {*LONG_MARKS}
        weight = sum(LONG_MARKS[name] for name in marks)
        # Nothing is as long as all files of Spark's session one after another.
        weight += sum(LONG_MARKS.values()) if _uses_session(item.path) else 0
        weights[item.path] = max(weights[item.path], weight)
        slow_counts[item.path] += bool(marks)
    items.sort(key=lambda item: (-weights[item.path], -slow_counts[item.path]))


class Scheduling(LoadFileScheduling):
    """Files stay with one worker, for the servers that their tests share.

    So do the files of a directory that use one Spark, in this process or in others, and
    those of the house: each worker that has tests of them starts it, or parses all
    sources.
    """

    def _split_scope(self, nodeid: str) -> str:
        file = nodeid.split("::", 1)[0]
        is_shared = file.startswith("tests/house/") or _uses_session(
            self.config.rootpath / file
        )
        return file.rpartition("/")[0] if is_shared else file


@lru_cache
def _uses_session(file: Path) -> bool:
    text = file.read_text()
    return "spark: SparkSession" in text or "drivers: Drivers" in text


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(
    config: pytest.Config, log: Any
) -> LoadFileScheduling | None:
    """Say which tests share a worker."""
    return Scheduling(config, log) if config.option.dist == "loadfile" else None


def pytest_sessionfinish() -> None:
    """Let one collection see what tests left behind for later.

    Pytest makes five more, each of which takes long where so much is there: they look
    at what this one leaves behind. In a quick run it looks at what the last tests left.
    """
    if not IS_QUICK:
        gc.unfreeze()
    gc.collect()
    gc.freeze()


def pytest_report_header() -> str:
    """Print the seed where every report begins."""
    return f"seed: {SEED} (METAQ_SEED={SEED} repeats this run)"


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, exitstatus: int
) -> None:
    """Print the seed at the end as well: quiet runs have no header."""
    terminalreporter.write_line(f"seed: METAQ_SEED={SEED}")


def pytest_runtest_protocol(
    item: pytest.Item, nextitem: pytest.Item | None
) -> bool | None:
    """Run a test of Spark anew, fixtures and all, when Spark gave up on its Python.

    A worker of xdist sends one report of a test, if all goes well, and not that it
    begins and ends: each message is as much work as a short test.
    """
    tries = LATE_WORKER_TRIES if item.get_closest_marker("spark") else 1
    is_worker = hasattr(item.config, "workerinput")
    if tries == 1 and not is_worker:
        return None
    if not is_worker:
        item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
    for number in range(1, tries + 1):
        reports = runtestprotocol(item, log=False, nextitem=nextitem)
        if number == tries or not any(map(_has_late_worker, reports)):
            break
        item._initrequest()  # type: ignore[attr-defined]
    for report in reports:
        if not is_worker or _says_something(report):
            item.ihook.pytest_runtest_logreport(report=report)
    if not is_worker:
        item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
    return True


def _says_something(report: pytest.TestReport) -> bool:
    """Return False for a short setup or teardown in which all went well."""
    return report.when == "call" or not report.passed or report.duration > TOLD_S


def _has_late_worker(report: pytest.TestReport) -> bool:
    # Long sentences are cut in two where values are compared; "E" begins each line.
    words = re.findall("[A-Za-z]+", report.longreprtext) if report.failed else []
    return LATE_WORKER in " ".join(word for word in words if word != "E")


@pytest.fixture
def seed() -> int:
    """Return the seed of this run."""
    return SEED


@pytest.fixture
def rng(seed: int) -> random.Random:
    """Return a fresh random source, the same for each test of a run."""
    return random.Random(seed)


@pytest.fixture
def data_dir(tmp_path: Path) -> Path:
    """Return an empty directory for a broker's or a log's data."""
    path = tmp_path / "data"
    path.mkdir()
    return path


@pytest.fixture(params=BROKERS)
def broker_kind(request: pytest.FixtureRequest) -> str:
    """Return the kind of brokers that the test runs with: each has its turn."""
    return request.param


@pytest.fixture
def start_broker(broker_kind: str, tmp_path: Path, seed: int) -> Iterator[StartBroker]:
    """Start brokers of one kind, as `broker_of` makes them; stopped after the test."""
    with _starting(broker_kind, tmp_path, seed) as start:
        yield start


@pytest.fixture
def start_metaq_1_4(tmp_path: Path, seed: int) -> Iterator[StartBroker]:
    """Start MetaQ 1.4 brokers, for tests of this kind alone; they say why."""
    with _starting(METAQ_1_4, tmp_path, seed) as start:
        yield start


@contextlib.contextmanager
def _starting(kind: str, tmp_path: Path, seed: int) -> Iterator[StartBroker]:
    with contextlib.ExitStack() as stack:
        numbers = itertools.count()

        def start(*topics: Any, **options: Any) -> AnyBroker:
            path = tmp_path / f"{kind}-{next(numbers)}"
            made = broker_of(kind, path, *topics, seed=seed, **options)
            return stack.enter_context(made)

        yield start


@pytest.fixture(autouse=True)
def _unclosed_resources_are_errors(
    request: pytest.FixtureRequest,
) -> Iterator[None]:
    """Make a leak fail the test that leaked, not whichever runs next.

    CPython reports an unclosed file or socket when it is freed; only objects in
    reference cycles need a collection, so only tests with an event loop pay for one.
    What was there before the test is frozen: a collection looks at the test's own.
    """
    has_loop = "asyncio" in getattr(request.module, "__dict__", {})
    if has_loop:
        gc.freeze()
    yield
    if has_loop:
        gc.collect()
