"""Statements of docs/client.md and the README on the client are true, and run."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Self, get_type_hints

import pytest

from metaq import client
from metaq.client import ClientOptions, ConsumerOptions, ProducerOptions
from metaq.client.metrics import METRICS, PARTITION_SERIES_MAX
from metaq.client.options import ClientKeywords, ConsumerKeywords, ProducerKeywords
from metaq.clock import Clock
from metaq.testing.fake_broker import FakeBroker
from metaq.zk.coordinator import ZooKeeperCoordinator
from tests.brokers import BROKERS, PYTHON
from tests.docs import reference
from tests.docs.blocks import ROOT
from tests.docs.programs import ADDRESS, local_zookeeper, make_chroot, python_files

SESSION_TIMEOUT_MS = 4000
PAGE = ROOT / "docs" / "client.md"
TEXT = PAGE.read_text()
REDIS_IDS = "redis_ids.py"
OURS = {"make_topic.py", "enrich.py", "readme_2.py"}
"""Need brokers of this package."""
FILES = python_files(TEXT)


def test_every_metric_that_is_named_is_there() -> None:
    """The table is one of the reference."""
    known = {metric.spec.name for metric in METRICS} | {"metaq_log_end_bytes"}
    named = set(re.findall(r"\bmetaq_[a-z_]+\b", TEXT + reference.PAGE.read_text()))
    assert len(named) > 50
    assert named <= known
    assert f"first {PARTITION_SERIES_MAX:,} by name" in TEXT


@pytest.mark.slow
def test_the_reference_is_that_of_the_code() -> None:
    """`python -m tests.docs.reference` writes it; advice is for errors that exist."""
    assert reference.PAGE.read_text().rstrip() == reference.page().rstrip()
    assert reference.ADVICE.keys() <= set(client.__all__)


@pytest.mark.parametrize(
    ("options", "keywords"),
    [
        (ClientOptions, ClientKeywords),
        (ProducerOptions, ProducerKeywords),
        (ConsumerOptions, ConsumerKeywords),
    ],
)
def test_keywords_have_the_fields_and_types_of_their_options(
    options: type, keywords: type
) -> None:
    """Two spellings of one thing: what mypy sees, and what is there."""
    assert get_type_hints(keywords) == get_type_hints(options)


def test_every_block_of_python_has_a_name() -> None:
    """One without would not be run."""
    assert TEXT.count("```python") == len(FILES) > 0


class Redis:
    """Stand-in for Redis with the calls of the page, as its package shows them."""

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}
        self._waiting: list[tuple[str, bytes]] = []

    def mget(self, keys: Sequence[str]) -> list[bytes | None]:
        return [self._values.get(key) for key in keys]

    def pipeline(self, *, transaction: bool) -> Self:
        assert not transaction
        return self

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        assert self._waiting == []

    def set(self, key: str, value: bytes, *, ex: int) -> None:
        assert ex > 0
        self._waiting.append((key, value))

    def execute(self) -> None:
        self._values.update(self._waiting)
        self._waiting.clear()


def test_ids_that_one_member_added_to_redis_another_one_has_seen() -> None:
    """The class of the page; when they are asked is tested with the consumer."""
    names: dict[str, Any] = {}
    exec(FILES[REDIS_IDS], names)
    redis = Redis()
    one, other = names["RedisIds"](redis), names["RedisIds"](redis)
    one.add(["g1", "g2"])
    assert list(other.seen(["g1", "x", "g2"])) == ["g1", "g2"]


README = {
    f"readme_{number}.py": text
    for number, text in enumerate(
        re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    )
    if "pyspark" not in text
}
"""Programs of the client; `test_blocks.py` runs the whole page, Spark included."""


@pytest.fixture(scope="module")
def zookeeper(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with local_zookeeper(tmp_path_factory.mktemp("local")) as address:
        yield address


@pytest.fixture(params=BROKERS)
def cluster(request: pytest.FixtureRequest, zookeeper: str, seed: int) -> Iterator[str]:
    """Return what stands for "127.0.0.1:2181" and leads to one broker of a kind."""
    if request.param == PYTHON:
        yield zookeeper
        return
    chroot = make_chroot(zookeeper, "metaq-1-4")

    def make(clock: Clock) -> ZooKeeperCoordinator:
        return ZooKeeperCoordinator(
            chroot, session_timeout_ms=SESSION_TIMEOUT_MS, clock=clock
        )

    with FakeBroker(coordinator=make, seed=seed) as broker:
        broker.reorder = broker.splits_anywhere = broker.misorders_puts = True
        yield chroot


@pytest.mark.slow
@pytest.mark.zookeeper
def test_the_snippets_run_one_after_the_other(tmp_path: Path, cluster: str) -> None:
    """As they stand, but for the port: the page's, then those of the README."""
    for name, text in {**FILES, **README}.items():
        if name == REDIS_IDS:
            continue  # a class, run below
        if name in OURS and cluster.endswith("/metaq-1-4"):
            continue
        assert text.count(f'"{ADDRESS}"') == 1, name
        script = tmp_path / name
        script.write_text(text.replace(ADDRESS, cluster))
        done = subprocess.run(
            [sys.executable, "-W", "error", str(script)],
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        assert done.stdout, name
