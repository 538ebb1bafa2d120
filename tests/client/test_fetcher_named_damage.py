"""Damage reported by a broker is reported, or skipped, at once."""

import asyncio
import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from metaq.client import AsyncClient, Client
from metaq.client.cluster.metadata_queries import LogQueries
from metaq.client.errors import StuckError
from metaq.client.offsets.offset_reset import find_goal
from metaq.errors import CorruptRecordError
from metaq.model import MAX_OFFSET, Offset
from tests.brokers import PYTHON, AnyBroker, PythonBroker, broker_of
from tests.client.worlds import IDLE, QUICK, WORLDS, partition, parts_of, payloads, take
from tests.rigs.waiting import wait_until

ONE_BROKER = {"broker": "MetaQ 1.4 cannot name damage: tests/peer/test_gap_search.py"}

ZERO = partition(0)
SEGMENT_BYTES = 200
FLIPPED = {"flipped bit": 25, "flipped length": 3, "huge length": 0}
"""A byte of a record; its lowest bit is flipped."""


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[AnyBroker]:
    settings = {"maxSegmentSize": str(SEGMENT_BYTES)}
    with broker_of(PYTHON, tmp_path / "broker", settings=settings) as one:
        yield one


class Scene:
    """A log with a damaged place, and what can be read around it."""

    def __init__(self, broker: PythonBroker, kind: str) -> None:
        self.data = [b"%02d" % number + b"x" * 28 for number in range(11)]
        with Client(brokers=[broker.address]) as client, client.producer() as producer:
            # One by one: a batch is in one segment.
            self.offsets = [producer.send("test", one).offset for one in self.data]
        broker.stop()
        segments = sorted(broker.inner.data_path.glob("**/test-0/*.meta"))
        assert len(segments) >= 3
        if kind in FLIPPED:
            self.path = segments[-1]
            self.start = self._offset_in(self.path)
            flip(self.path, self.start - int(self.path.stem) + FLIPPED[kind])
            self.end = self.offsets[self.offsets.index(self.start) + 1]
        else:
            self.path = segments[0]
            self.end = Offset(int(segments[1].stem))
            lost = self.offsets.index(self.end) - 1
            self.start = self.offsets[lost]
            os.truncate(self.path, self.start + 7)
        broker.start()
        good = [o for o in self.offsets if not self.start <= o < self.end]
        self.readable = [self.data[self.offsets.index(one)] for one in good]
        self.before = sum(one < self.start for one in self.offsets)

    def _offset_in(self, path: Path) -> Offset:
        """Return a record of a segment that has others on both sides."""
        inside = [one for one in self.offsets if one >= int(path.stem)]
        assert len(inside) >= 3
        return inside[1]


def flip(path: Path, position: int) -> None:
    fd = os.open(path, os.O_RDWR)
    (byte,) = os.pread(fd, 1, position)
    os.pwrite(fd, bytes([byte ^ 1]), position)
    os.close(fd)


@pytest.fixture(params=[*FLIPPED, "truncated segment"])
def scene(request: pytest.FixtureRequest, broker: Any) -> Scene:
    return Scene(broker, request.param)


@pytest.fixture(params=["sync", "async"])
def client(request: pytest.FixtureRequest, broker: Any) -> Iterator[Any]:
    with WORLDS[request.param](brokers=[broker.address], **QUICK) as one:
        yield one


def assert_names(error: CorruptRecordError, scene: Scene) -> None:
    assert error.partition == ZERO
    assert error.offset == scene.start
    assert error.next_good_offset == scene.end
    assert error.path == str(scene.path)
    text = str(error)
    assert f"test/0-0: damaged record at offset {scene.start}: " in text
    assert f"reading can go on at offset {scene.end}" in text
    assert str(scene.path) in text


def test_a_consumer_stops_at_once(scene: Scene, client: Any) -> None:
    """With what it read before handed out, and an error that says all there is."""
    with client.consumer("g", ["test"], **IDLE) as consumer:
        found = take(consumer, scene.before)
        assert payloads(found) == scene.readable[: scene.before]
        with pytest.raises(CorruptRecordError) as caught:
            take(consumer, 1)
        assert_names(caught.value, scene)
        assert consumer.statistics().fetches[ZERO].error_count == 0


def test_a_consumer_skips_at_once(scene: Scene, client: Any) -> None:
    """Skipped bytes are counted as when the consumer finds the damage itself."""
    options = {"on_corrupt": "skip", **IDLE}
    with client.consumer("g", ["test"], **options) as consumer:
        found = take(consumer, len(scene.readable))
        assert payloads(found) == scene.readable
        statistics = consumer.statistics()
        assert statistics.fetches[ZERO].skipped_count == 1
        assert statistics.fetches[ZERO].error_count == 0
        assert statistics.missing_bytes == scene.end - scene.start


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["stop", "skip"])
@pytest.mark.parametrize("world", ["sync", "async"])
def test_handlers_hear_of_it_as_iterators_do(
    broker: Any, scene: Scene, world: str, policy: Any
) -> None:
    """`run` ends with the error, or handles the later messages."""
    handled: list[bytes] = []

    def keep(message: Any) -> None:
        handled.append(message.data)

    async def keep_async(message: Any) -> None:
        keep(message)

    handler = keep if world == "sync" else keep_async
    with (
        WORLDS[world](brokers=[broker.address], **QUICK) as client,
        client.consumer("g", ["test"], on_corrupt=policy, **IDLE) as consumer,
    ):
        if policy == "stop":
            with pytest.raises(CorruptRecordError) as caught:
                consumer.run(handler, timeout=60)
            assert_names(caught.value, scene)
            assert handled == scene.readable[: scene.before]
            return
        while len(handled) < len(scene.readable):
            consumer.run(handler, timeout=0.1)
        assert handled == scene.readable


def test_browsers_and_single_gets_name_it(scene: Scene, client: Any) -> None:
    """Messages before it are handed out first."""
    found = iter(client.browse("test"))
    before = [next(found).data for _ in range(scene.before)]
    assert before == scene.readable[: scene.before]
    with pytest.raises(CorruptRecordError) as caught:
        next(found)
    assert_names(caught.value, scene)
    with pytest.raises(CorruptRecordError) as caught:
        client.get("test", "0-0", scene.start, 1000)
    assert_names(caught.value, scene)


def test_a_group_may_be_moved_behind_it(scene: Scene, broker: AnyBroker) -> None:
    """That is the remedy; to the place itself it may not."""

    async def scenario() -> None:
        async with AsyncClient(brokers=[broker.address], **QUICK) as client:
            find = partial(find_goal, parts_of(client), ZERO)
            deadline_s = parts_of(client).clock.monotonic_s() + 30
            assert await find(scene.end, deadline_s=deadline_s) == scene.end
            log = LogQueries(parts_of(client), ZERO, deadline_s)
            count = await log.count(scene.end, MAX_OFFSET)
            assert count == len(scene.readable) - scene.before
            with pytest.raises(CorruptRecordError):
                await find(Offset(scene.end - 1), deadline_s=deadline_s)

    asyncio.run(scenario())


def test_lag_across_it_has_bytes_and_no_count(scene: Scene, client: Any) -> None:
    """Unknown is not zero, and no error."""
    with client.consumer("g", ["test"], commit_interval_s=None, **IDLE) as consumer:
        take(consumer, scene.before)
        lag = consumer.lag()[ZERO]
        assert lag.messages is None
        assert lag.bytes > 0


def test_the_cause_is_told_whatever_the_text_says(
    scene: Scene, client: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No client depends on a sentence."""
    monkeypatch.setattr("metaq.protocol.texts.put_failed", lambda *_args: "nein")
    with client.consumer("g", ["test"], **IDLE) as consumer:
        take(consumer, scene.before)
        with pytest.raises(CorruptRecordError) as caught:
            take(consumer, 1)
        assert_names(caught.value, scene)


@pytest.mark.slow
def test_refusals_without_a_word_of_damage_end_with_the_watchdog(
    scene: Scene, client: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Data, a worker that waits, and the same 500 for ever."""
    monkeypatch.setattr(
        "metaq.protocol.texts.with_damage", lambda text, *_args, **_named: text
    )
    with client.consumer("g", ["test"], watchdog_s=1.0, **IDLE) as consumer:
        take(consumer, scene.before)
        with pytest.raises(StuckError) as caught:
            take(consumer, 1)
    text = str(caught.value)
    assert f"at offset {scene.start}, although the log goes on to" in text
    assert "a reader waits; the last get failed: Put message to " in text


@pytest.mark.slow
def test_a_scrub_that_finds_it_under_a_reader_is_heard_of(
    broker: Any, client: Any
) -> None:
    """A get that waits at the end hears of nothing; one that comes there does."""
    offsets = broker.put(b"a", b"b", b"c")
    path = next(broker.inner.data_path.glob("**/test-0/*.meta"))
    with client.consumer("g", ["test"], **IDLE) as consumer:
        assert payloads(take(consumer, 3)) == [b"a", b"b", b"c"]
        flip(path, offsets[1] + 20)
        broker.restart()
        wait_until(lambda: consumer.health().is_ok)
        consumer.seek(ZERO, offsets[0])
        assert payloads(take(consumer, 1)) == [b"a"]
        with pytest.raises(CorruptRecordError) as caught:
            take(consumer, 1)
        assert caught.value.next_good_offset == offsets[2]
