"""A consumer reads, hands out and commits; on our broker and on MetaQ 1.4's, sync and
async."""

import asyncio
import contextlib
import itertools
import math
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from metaq.client import Client, Consumer
from metaq.client.cluster.context import ClientContext
from metaq.client.consume import cursor, fetcher
from metaq.client.consume.fetch_buffer import FetchBuffer
from metaq.client.consume.progress import ConsumerState
from metaq.client.errors import NoProgressError
from metaq.client.offsets.offset_store import MemoryOffsets
from metaq.errors import ClosedError, ConfigError, CorruptRecordError, MetaqError
from metaq.model import Message, Offset
from metaq.testing.fake_broker import FaultKind
from tests.brokers import StartBroker
from tests.client.asking import lacking
from tests.client.worlds import IDLE, QUICK, WORLDS, partition, payloads, take
from tests.rigs.inside import fetchers_of, twin_of
from tests.rigs.waiting import PATIENCE_S, wait_until

ONE_BROKER = {
    "java": "damage, faults on cue, a log whose start moves, a broker that never waits",
    "test_a_broker_that_is_away_does_not_keep_another_one_waiting": "it fails on cue",
}

ZERO = partition(0)


@pytest.fixture
def broker(start_broker: StartBroker) -> Any:
    return start_broker({"test": 1, "two": 2})


@pytest.fixture
def java(start_metaq_1_4: StartBroker) -> Any:
    return start_metaq_1_4()


@pytest.fixture(params=["sync", "async"])
def client(request: pytest.FixtureRequest, broker: Any) -> Iterator[Any]:
    with WORLDS[request.param](brokers=[broker.address], **QUICK) as one:
        yield one


@pytest.fixture(params=["sync", "async"])
def java_client(request: pytest.FixtureRequest, java: Any) -> Iterator[Any]:
    with WORLDS[request.param](brokers=[java.address], **QUICK) as one:
        yield one


def numbered(start: int, stop: int) -> list[bytes]:
    return [b"m%05d" % n for n in range(start, stop)]


# -- at least once --------------------------------------------------------------------


def test_after_a_clean_end_the_next_member_goes_on_behind_it(
    broker: Any, client: Any
) -> None:
    """The end of the block counts the last message too."""
    broker.put(*numbered(0, 10))
    store = MemoryOffsets()
    with client.consumer("g", ["test"], offsets=store, **IDLE) as consumer:
        assert payloads(take(consumer, 4)) == numbered(0, 4)
    with client.consumer("g", ["test"], offsets=store, **IDLE) as consumer:
        assert payloads(take(consumer, 6)) == numbered(4, 10)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("place", "name"),
    [
        (cursor, "decode_messages"),
        (FetchBuffer, "put"),
        (fetcher, "encode"),
    ],
)
def test_messages_that_find_no_memory_are_fetched_again(
    broker: Any, client: Any, place: object, name: str
) -> None:
    """In their order, and nothing is left out."""
    broker.put(*numbered(0, 10))
    with (
        lacking(place, name, times=2),
        client.consumer("g", ["test"], start="earliest", **IDLE) as consumer,
    ):
        assert payloads(take(consumer, 10)) == numbered(0, 10)


def test_a_message_whose_handling_failed_comes_again(broker: Any, client: Any) -> None:
    broker.put(*numbered(0, 5))
    store = MemoryOffsets()
    with (
        contextlib.suppress(ZeroDivisionError),
        client.consumer("g", ["test"], offsets=store, **IDLE) as consumer,
    ):
        for message in consumer:
            if message.data == b"m00002":
                raise ZeroDivisionError
    with client.consumer("g", ["test"], offsets=store, **IDLE) as consumer:
        assert payloads(take(consumer, 3)) == numbered(2, 5)


def test_a_commit_counts_the_message_being_handled(broker: Any, client: Any) -> None:
    broker.put(*numbered(0, 5))
    store = MemoryOffsets()
    options = {"offsets": store, "commit_interval_s": None, **IDLE}
    with (
        contextlib.suppress(ZeroDivisionError),
        client.consumer("g", ["test"], **options) as consumer,
    ):
        take(consumer, 3)
        consumer.commit()
        raise ZeroDivisionError
    with client.consumer("g", ["test"], **options) as consumer:
        assert payloads(take(consumer, 2)) == numbered(3, 5)


def test_closing_counts_only_what_was_followed_by_another_one(
    broker: Any, client: Any
) -> None:
    broker.put(*numbered(0, 5))
    store = MemoryOffsets()
    consumer = client.consumer("g", ["test"], offsets=store, **IDLE)
    consumer.start()
    take(consumer, 3)
    consumer.close()
    consumer.close()
    with client.consumer("g", ["test"], offsets=store, **IDLE) as consumer:
        assert payloads(take(consumer, 1)) == [b"m00002"]


def test_what_was_handled_is_committed_by_itself(broker: Any, client: Any) -> None:
    broker.put(*numbered(0, 5))
    store = MemoryOffsets()
    options = {"offsets": store, "commit_interval_s": 0.01, **IDLE}
    with client.consumer("g", ["test"], **options) as consumer:
        fourth = take(consumer, 4)[-1]

        def is_committed() -> bool:
            offset = asyncio.run(store.load("g", ZERO, deadline_s=0.0))
            return offset is not None and offset.offset == fourth.offset

        wait_until(is_committed)
        assert consumer.statistics().commit_count >= 1
        assert consumer.health().uncommitted_count == 0


def test_two_loops_one_after_the_other_miss_and_repeat_nothing(
    broker: Any, client: Any
) -> None:
    broker.put(*numbered(0, 6))
    with client.consumer("g", ["test"], **IDLE) as consumer:
        assert payloads(take(consumer, 2)) == numbered(0, 2)
        assert consumer.receive(30).data == b"m00002"
        assert payloads(consumer.receive_many(2, 30)) == numbered(3, 5)
        assert payloads(take(consumer, 1)) == numbered(5, 6)


def test_a_store_that_fails_is_told_and_asked_again(broker: Any, client: Any) -> None:
    broker.put(*numbered(0, 3))

    class Broken(MemoryOffsets):
        is_broken = True

        async def commit(self, *args: Any, **named: Any) -> Any:
            if self.is_broken:
                raise MetaqError("the disk is gone")
            return await super().commit(*args, **named)

    store = Broken()
    options = {"offsets": store, "commit_interval_s": None, **IDLE}
    with client.consumer("g", ["test"], **options) as consumer:
        take(consumer, 2)
        with pytest.raises(MetaqError, match="the disk is gone"):
            consumer.commit()
        assert consumer.health().problems == ("commit: the disk is gone",)
        assert not consumer.health().is_ok
        store.is_broken = False
        consumer.commit()
        assert consumer.health().is_ok
        assert consumer.statistics().commit_failure_count == 1
    with client.consumer("g", ["test"], offsets=store, **IDLE) as consumer:
        assert payloads(take(consumer, 1)) == [b"m00002"]


def test_what_this_process_has_handled_is_not_handed_to_it_again(
    broker: Any, client: Any
) -> None:
    """Its commit failed, and the partition comes back; `seek` asks for it all."""
    offsets = broker.put(*numbered(0, 5))

    class Broken(MemoryOffsets):
        async def commit(self, *_args: Any, **_named: Any) -> Any:
            raise MetaqError("the disk is gone")

    for skips, wanted in [(True, numbered(3, 5)), (False, numbered(0, 5))]:
        options = {"skip_repeats": skips, **IDLE}
        name = f"g-{skips}"
        with client.consumer(name, ["test"], offsets=Broken(), **IDLE) as consumer:
            take(consumer, 3)
        with client.consumer(name, ["test"], **options) as consumer:
            assert payloads(take(consumer, len(wanted))) == wanted
            assert consumer.statistics().repeat_count == 5 - len(wanted)
            consumer.seek(ZERO, offsets[0])
            assert consumer.receive(30).data == b"m00000"


# -- receiving ------------------------------------------------------------------------


def test_receiving_ends_with_nothing_when_the_time_is_over(client: Any) -> None:
    with client.consumer("g", ["test"], **IDLE) as consumer:
        assert consumer.receive(0.01) is None
        assert consumer.receive_many(10, 0.01) == []
        assert consumer.receive_many(10, 0) == []


def test_receive_many_gives_at_most_what_was_asked_for(
    broker: Any, client: Any
) -> None:
    broker.put(*numbered(0, 5))
    with client.consumer("g", ["test"], **IDLE) as consumer:
        assert payloads(consumer.receive_many(3, 30)) == numbered(0, 3)
        assert payloads(consumer.receive_many(3, 30)) == numbered(3, 5)
        with pytest.raises(ConfigError, match="expected 1 or more, got 0"):
            consumer.receive_many(0, 5)


def test_every_partition_of_every_topic_is_read_in_its_order(
    broker: Any, client: Any
) -> None:
    broker.put(*numbered(0, 50))
    for number in (0, 1):
        broker.put(*numbered(100, 150), topic="two", partition=number)
    with client.consumer("g", ["test", "two"], **IDLE) as consumer:
        found = take(consumer, 150)
        assert consumer.assignment() == {ZERO, partition(0, "two"), partition(1, "two")}
    for where, wanted in [
        (ZERO, numbered(0, 50)),
        (partition(0, "two"), numbered(100, 150)),
        (partition(1, "two"), numbered(100, 150)),
    ]:
        assert payloads([m for m in found if m.partition == where]) == wanted


@pytest.mark.slow
def test_partitions_take_turns(broker: Any, client: Any) -> None:
    """A long backlog in one partition does not keep the other one waiting."""
    for number in (0, 1):
        broker.put(*numbered(0, 2000), topic="two", partition=number)
    with client.consumer("g", ["two"], fetch_bytes=4096, **IDLE) as consumer:
        consumer.receive(30)
        wait_until(lambda: all(s.get_count > 1 for s in _fetches(consumer)))
        first = [m.partition.partition for m in take(consumer, 2000)]
    assert 0 in first
    assert 1 in first


def _fetches(consumer: Any) -> list[Any]:
    fetches = list(consumer.statistics().fetches.values())
    return fetches if len(fetches) == 2 else [fetches[0], fetches[0]]


def test_a_topic_that_comes_later_is_read(broker: Any, client: Any) -> None:
    with client.consumer("g", ["test", "late"], **IDLE) as consumer:
        wait_until(lambda: consumer.assignment() == {ZERO})
        broker.create_topic("late", 1)
        broker.put(b"first", topic="late")
        assert consumer.receive(30).data == b"first"


@pytest.mark.slow
def test_a_message_much_larger_than_a_get_is_read(broker: Any, client: Any) -> None:
    large = bytes(range(256)) * 1024
    broker.put(b"small", large, b"last")
    if not broker.has_extensions:
        broker.inner.metaq.transfer_bytes_max = 1000
    options = {"fetch_bytes": 65536, **IDLE}
    with client.consumer("g", ["test"], **options) as consumer:
        assert payloads(take(consumer, 3)) == [b"small", large, b"last"]


def test_a_message_above_the_bound_ends_the_consumer_with_its_place(
    broker: Any, client: Any
) -> None:
    _, offset = broker.put(b"small", bytes(300_000))
    options = {"fetch_bytes": 65536, "fetch_bytes_max": 100_000, **IDLE}
    with client.consumer("g", ["test"], **options) as consumer:
        assert consumer.receive(30).data == b"small"
        with pytest.raises(NoProgressError, match=rf"offset {offset}.*100000"):
            consumer.receive(30)
        assert consumer.health().state is ConsumerState.FAILED


@pytest.mark.slow
def test_a_backlog_is_not_fetched_beyond_the_bound(broker: Any, client: Any) -> None:
    broker.put(*([bytes(1000)] * 2000))
    options = {"buffer_bytes_max": 200_000, "fetch_bytes": 65536, **IDLE}
    with client.consumer("g", ["test"], **options) as consumer:
        assert consumer.receive(30) is not None
        fetch_buffer = async_of(consumer).fetch_buffer
        most = 0
        for count in range(1, 2000):
            assert consumer.receive(30) is not None, count
            most = max(most, _buffered_count(fetch_buffer))
        assert most * 1000 <= 200_000 + 2 * 65536
        assert consumer.receive(0) is None
        assert _buffered_count(fetch_buffer) == 0


@pytest.mark.slow
def test_gets_of_many_partitions_share_the_bound(broker: Any, client: Any) -> None:
    """Those that were begun first too: what is in flight is bounded as a whole."""
    count = 16
    broker.create_topic("many", count)
    for number in range(count):
        broker.put(b"m", topic="many", partition=number)
    options = {"buffer_bytes_max": count * 65536, **IDLE}
    with client.consumer("g", ["many"], **options) as consumer:
        assert len(take(consumer, count)) == count
        twin = async_of(consumer)
        wait_until(lambda: _asked_bytes(twin) == count * 65536)


def _buffered_count(fetch_buffer: Any) -> int:
    return sum(buffer.buffered_count for buffer in fetch_buffer.statistics().values())


def _asked_bytes(consumer: Any) -> int:
    fetchers = fetchers_of(consumer).values()
    return sum(fetcher.cursor.size_bytes for fetcher in fetchers)


def async_of(consumer: Any) -> Any:
    """Return the async consumer of either world."""
    return twin_of(consumer) if isinstance(consumer, Consumer) else consumer.twin


def test_filtered_messages_are_not_delivered_and_count_as_handled(
    broker: Any, client: Any
) -> None:
    broker.put(*numbered(0, 10))
    store = MemoryOffsets()

    def is_even(message: Message) -> bool:
        return int(message.data[1:]) % 2 == 0

    options = {"offsets": store, "message_filter": is_even, **IDLE}
    with client.consumer("g", ["test"], **options) as consumer:
        assert payloads(take(consumer, 5)) == numbered(0, 10)[::2]
    statistics = consumer.statistics()
    assert (statistics.delivered_count, statistics.filtered_count) == (5, 5)
    with client.consumer("g", ["test"], offsets=store, **IDLE) as consumer:
        assert consumer.receive(0.05) is None


@pytest.mark.slow
def test_a_filter_that_fails_ends_the_consumer_and_loses_nothing(
    broker: Any, client: Any
) -> None:
    """No later message is handed out, or this one would be skipped."""
    broker.put(*numbered(0, 12000))
    store = MemoryOffsets()

    def choke(message: Message) -> bool:
        if message.data == b"m03000":
            raise ValueError("what is this?")
        return True

    options = {
        "offsets": store, "message_filter": choke, "fetch_bytes": 65536, **IDLE,
    }  # fmt: skip
    found: list[Message] = []
    with (
        pytest.raises(MetaqError, match="what is this"),
        client.consumer("g", ["test"], **options) as consumer,
    ):
        found += consumer
    assert payloads(found) == numbered(0, len(found))
    assert len(found) <= 3000
    with client.consumer("g", ["test"], offsets=store, **IDLE) as consumer:
        # The message being handled when the error came was not confirmed.
        assert consumer.receive(30).offset <= found[-1].next_offset


# -- damage ---------------------------------------------------------------------------


def test_a_damaged_record_ends_the_consumer_behind_what_is_good(
    java: Any, java_client: Any
) -> None:
    offsets = java.put(*numbered(0, 5))
    java.inner.corrupt(offsets[2])
    with java_client.consumer("g", ["test"], **IDLE) as consumer:
        assert payloads([consumer.receive(30), consumer.receive(30)]) == numbered(0, 2)
        with pytest.raises(CorruptRecordError, match=f"offset {offsets[2]}"):
            consumer.receive(30)
        with pytest.raises(CorruptRecordError):
            take(consumer, 1)
        health = consumer.health()
        assert health.state is ConsumerState.FAILED
        assert f"offset {offsets[2]}" in " ".join(health.problems)
        gets = java.inner.statistics().commands["get"]
        assert gets < 10


def test_damaged_records_are_skipped_and_counted_when_asked_for(
    java: Any, java_client: Any
) -> None:
    offsets = java.put(*numbered(0, 6))
    java.inner.corrupt(offsets[1])
    java.inner.corrupt(offsets[4])
    store = MemoryOffsets()
    options = {"on_corrupt": "skip", "offsets": store, **IDLE}
    with java_client.consumer("g", ["test"], **options) as consumer:
        assert payloads(take(consumer, 4)) == [
            b"m00000",
            b"m00002",
            b"m00003",
            b"m00005",
        ]
        statistics = consumer.statistics()
        assert statistics.fetches[ZERO].skipped_count == 2
        assert statistics.missing_bytes == 2 * (offsets[1] - offsets[0])
    with java_client.consumer("g", ["test"], offsets=store, **IDLE) as consumer:
        assert consumer.receive(0.05) is None


def test_what_lies_behind_damage_is_not_skipped_when_answers_are_short(
    java: Any, java_client: Any
) -> None:
    """A broker may send less than requested: no complete record follows the damage."""
    texts = [text * 20 for text in numbered(0, 4)]
    offsets = java.put(*texts)
    java.inner.metaq.transfer_bytes_max = 3 * (offsets[1] - offsets[0]) // 2
    java.inner.corrupt(offsets[1])
    options = {"on_corrupt": "skip", **IDLE}
    with java_client.consumer("g", ["test"], **options) as consumer:
        found = [consumer.receive(30) for _ in range(3)]
        assert payloads(found) == [texts[0], *texts[2:]]
        assert consumer.statistics().missing_bytes == offsets[1] - offsets[0]


@pytest.mark.slow
def test_a_log_whose_start_moves_on_is_followed_and_the_gap_is_told(
    java: Any, java_client: Any
) -> None:
    java.put(*numbered(0, 3))
    with java_client.consumer("g", ["test"], **IDLE) as consumer:
        assert payloads(take(consumer, 3)) == numbered(0, 3)
        java.inner.close_partition()
        wait_until(lambda: consumer.statistics().fetches[ZERO].error_count)
        java.put(*numbered(3, 6))
        java.inner.roll()
        java.inner.trim()
        java.put(*numbered(6, 8))
        java.inner.open_partition()
        assert payloads(take(consumer, 2)) == numbered(6, 8)
        assert consumer.statistics().missing_bytes > 0


def test_a_closed_partition_is_told_by_health_and_read_when_it_opens(
    broker: Any, client: Any
) -> None:
    broker.put(b"m")
    broker.close_partition()
    with client.consumer("g", ["test"], **IDLE) as consumer:
        wait_until(lambda: consumer.health().problems)
        assert not consumer.health().is_ok
        broker.open_partition()
        assert consumer.receive(30).data == b"m"
        wait_until(lambda: consumer.health().is_ok)


# -- an unreliable broker -------------------------------------------------------------


@pytest.mark.slow
def test_a_broker_with_bad_manners_loses_and_repeats_nothing(
    java: Any, java_client: Any
) -> None:
    """Answers late, in pieces, out of order; dropped connections and silent ones."""
    java.inner.split_bytes = 7
    java.inner.delay_s = 0.002
    java.inner.reorder = True
    java.inner.metaq.transfer_bytes_max = 200
    java.put(*numbered(0, 200))
    java.inner.inject(FaultKind.DROP, verb="get", after=5, count=2)
    java.inner.inject(FaultKind.DROP_STORED, verb="get", after=12)
    java.inner.inject(FaultKind.REFUSE, verb="get", after=15, status=503, count=2)
    java.inner.inject(FaultKind.REFUSE, verb="get", after=20, status=500)
    with java_client.consumer("g", ["test"], **IDLE) as consumer:
        assert payloads(take(consumer, 200)) == numbered(0, 200)
        assert consumer.statistics().fetches[ZERO].error_count >= 5
        assert java.inner.statistics().fault_count == 6


@pytest.mark.slow
def test_questions_at_the_start_survive_a_broker_that_is_starting(
    java: Any, java_client: Any
) -> None:
    java.put(b"m")
    java.inner.inject(FaultKind.REFUSE, verb="offset", status=503, count=2)
    java.inner.inject(FaultKind.DROP, verb="offset", after=2)
    with java_client.consumer("g", ["test"], **IDLE) as consumer:
        assert consumer.receive(30).data == b"m"


@pytest.mark.slow
def test_a_broker_that_restarts_under_load_costs_nothing(
    broker: Any, client: Any
) -> None:
    broker.put(*numbered(0, 500))
    options = {"fetch_bytes": 65536, "buffer_count_max": 50, **IDLE}
    with client.consumer("g", ["test"], **options) as consumer:
        found = take(consumer, 200)
        broker.stop()
        broker.start()
        broker.put(*numbered(500, 600))
        found += take(consumer, 400)
        assert payloads(found) == numbered(0, 600)
        wait_until(lambda: consumer.health().is_ok)


@pytest.mark.slow
def test_a_broker_that_is_away_does_not_keep_another_one_waiting(
    java: Any, start_metaq_1_4: StartBroker
) -> None:
    """Partitions that cannot be read yet are read as soon as they can."""
    other: Any = start_metaq_1_4(broker_id=1)
    java.put(b"here")
    other.put(b"there")
    # Registered, and not able to answer questions about its logs.
    other.inner.inject(FaultKind.REFUSE, verb="offset", status=500, count=3)
    addresses = [java.address, other.address]
    with Client(brokers=addresses, **QUICK) as client:
        assert len(client.partitions("test")) == 2
        with client.consumer("g", ["test"], **IDLE) as consumer:
            assert consumer.receive(30).data == b"here"
            assert consumer.health().state is ConsumerState.JOINING
            assert consumer.receive(30).data == b"there"
            wait_until(lambda: consumer.health().is_ok)


@pytest.mark.slow
@pytest.mark.parametrize("world", WORLDS)
def test_a_broker_that_goes_is_a_line_or_two_for_all_of_its_partitions(
    world: Any, start_broker: StartBroker, caplog: pytest.LogCaptureFixture
) -> None:
    """And as many when it goes again; `health` names each partition, and no long poll
    has to end before it says that all is well again."""
    broker = start_broker({"test": 5})
    options = {**QUICK, "request_timeout_s": 0.5}
    long_poll = {**IDLE, "wait_s": 10 * PATIENCE_S}
    with (
        WORLDS[world](brokers=[broker.address], **options) as client,
        client.consumer("g", ["test"], **long_poll) as consumer,
    ):
        for outage in (1, 2):
            wait_until(lambda: consumer.health().is_ok)
            wait_until(lambda: consumer.health().partition_count == 5)
            broker.stop()
            wait_until(lambda: len(consumer.health().problems) == 5)
            lines = [text for text in caplog.messages if "get failed" in text]
            # What was on its way, what could not leave any more, and what comes after
            # fail each in a way of its own.
            assert outage <= len(lines) <= 3 * outage
            broker.start()


def test_a_consumer_whose_named_broker_never_answered_is_not_well(
    start_broker: StartBroker,
) -> None:
    """It reads nothing, and said that all was well."""
    broker = start_broker({"test": 1})
    broker.stop()
    with (
        Client(brokers=[broker.address], **QUICK) as client,
        client.consumer("g", ["test"], **IDLE) as consumer,
    ):
        health = consumer.health()
        assert not health.is_ok
        assert health.problems == ("no broker has answered yet",)
        broker.start()
        wait_until(lambda: consumer.health().is_ok)


@pytest.mark.slow
def test_partitions_of_a_broker_that_the_cluster_has_lost_are_told(
    start_broker: StartBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The metadata may show it before any get has failed."""
    broker = start_broker({"test": 5})
    with (
        Client(brokers=[broker.address], **QUICK) as client,
        client.consumer("g", ["test"], **IDLE, wait_s=0.05) as consumer,
    ):
        wait_until(lambda: consumer.health().partition_count == 5)
        wait_until(lambda: consumer.health().is_ok)
        with monkeypatch.context() as patch:
            patch.setattr(ClientContext, "address_of", lambda *_: None)
            wait_until(lambda: len(consumer.health().problems) == 5)
            assert {*consumer.health().problems} == {
                f"test/0-{number}: broker 0 is away" for number in range(5)
            }
        wait_until(lambda: consumer.health().is_ok)


@pytest.mark.slow
def test_data_that_comes_after_a_long_silence_is_not_taken_for_a_stand_still(
    java: Any, java_client: Any
) -> None:
    """A broker without long poll is asked seldom: data may wait for the next get."""
    options = {"idle_step_s": 0.2, "idle_max_s": 0.2, "watchdog_s": 1.5}
    with java_client.consumer("g", ["test"], **options) as consumer:
        for number in range(2):
            assert consumer.receive(1.6) is None
            java.put(b"%d" % number)
            assert consumer.receive(30).data == b"%d" % number


# -- nothing to do --------------------------------------------------------------------


@pytest.mark.slow
def test_an_idle_consumer_asks_seldom(broker: Any, client: Any) -> None:
    """With long poll one get waits; without, the pauses grow."""
    broker.put(b"m")
    options = {"idle_step_s": 0.02, "idle_max_s": 1.0}
    with client.consumer("g", ["test"], **options) as consumer:
        began_s = time.monotonic()
        take(consumer, 1)
        assert consumer.receive(0.5) is None
        count = consumer.statistics().fetches[ZERO].get_count
        passed_s = time.monotonic() - began_s
        # 0.02 + 0.04 + ... passes half a second with the seventh pause.
        pauses_max = math.sqrt(passed_s / 0.01)
        assert count <= (3 if broker.has_extensions else 2 + pauses_max)


@pytest.mark.slow
def test_a_partition_without_a_log_is_not_asked_in_a_loop(
    broker: Any, client: Any
) -> None:
    with client.consumer("g", ["test"], **IDLE | {"idle_step_s": 0.05}) as consumer:
        began_s = time.monotonic()
        assert consumer.receive(0.5) is None
        count = consumer.statistics().fetches[ZERO].get_count
        assert count <= 5 + (time.monotonic() - began_s) / IDLE["idle_max_s"]
        broker.put(b"m")
        assert consumer.receive(30).data == b"m"


# -- where it is, and how it is doing -------------------------------------------------


def test_seek_goes_elsewhere_at_once(broker: Any, client: Any) -> None:
    offsets = broker.put(*numbered(0, 10))
    with client.consumer("g", ["test"], **IDLE) as consumer:
        found = []
        for message in consumer:
            found.append(message.data)
            if len(found) == 3:
                consumer.seek(ZERO, offsets[8])
            if len(found) == 5:
                break
        assert found == [*numbered(0, 3), *numbered(8, 10)]
        consumer.seek(ZERO, offsets[1])
        assert consumer.receive(30).data == b"m00001"
        with pytest.raises(ClosedError, match="not assigned"):
            consumer.seek(partition(7), Offset(0))


def test_rollback_delivers_again_what_was_not_committed(
    broker: Any, client: Any
) -> None:
    broker.put(*numbered(0, 6))
    with client.consumer("g", ["test"], commit_interval_s=None, **IDLE) as consumer:
        take(consumer, 2)
        consumer.commit()
        assert payloads(take(consumer, 3)) == numbered(2, 5)
        consumer.rollback()
        assert payloads(take(consumer, 4)) == numbered(2, 6)


def test_lag_counts_what_is_not_handled(broker: Any, client: Any) -> None:
    offsets = broker.put(*numbered(0, 10))
    step = offsets[1] - offsets[0]
    with client.consumer("g", ["test"], commit_interval_s=None, **IDLE) as consumer:
        take(consumer, 4)
        lag = consumer.lag()[ZERO]
        assert lag.bytes == 7 * step  # three are handled, one is being handled
        assert lag.messages == (7 if broker.has_extensions else None)
        if broker.has_extensions:
            assert lag.seconds is not None
            assert 0 <= lag.seconds < 60
        take(consumer, 6)
        consumer.commit()
        done = consumer.lag()[ZERO]
        assert (done.messages, done.bytes, done.seconds) == (0, 0, 0.0)


def test_health_tells_the_state(client: Any) -> None:
    consumer = client.consumer("g", ["test"], **IDLE)
    assert consumer.health().state is ConsumerState.NEW
    with consumer:
        wait_until(lambda: consumer.health().partition_count == 1)
        assert consumer.health().state is ConsumerState.RUNNING
        assert consumer.health().is_ok
        assert consumer.health().idle_s >= 0
    assert consumer.health().state is ConsumerState.CLOSED


# -- the watchdog ---------------------------------------------------------------------


@pytest.mark.slow
def test_a_partition_that_stands_still_with_data_is_an_error(
    broker: Any, client: Any
) -> None:
    """Whatever stopped the fetcher: a worker waits, there is data, nothing comes."""
    with client.consumer("g", ["test"], watchdog_s=0.1, **IDLE) as consumer:
        assert consumer.receive(0.3) is None  # silence without data is no error
        wait_until(lambda: ZERO in fetchers_of(async_of(consumer)))
        fetchers_of(async_of(consumer))[ZERO].stop()
        broker.put(b"m")
        with pytest.raises(MetaqError, match=r"test/0-0: no progress .*bound 0\.1 s"):
            consumer.receive(30)


@pytest.mark.slow
def test_a_slow_handler_is_not_stuck(broker: Any, client: Any) -> None:
    broker.put(*numbered(0, 3))
    release = threading.Event()
    with client.consumer("g", ["test"], watchdog_s=1.0, **IDLE) as consumer:
        assert consumer.receive(30).data == b"m00000"
        release.wait(1.5)
        assert consumer.receive(30).data == b"m00001"


# -- life -----------------------------------------------------------------------------


def test_a_consumer_that_was_not_started_says_so(client: Any) -> None:
    """It would wait for ever."""
    consumer = client.consumer("g", ["test"])
    with pytest.raises(ClosedError, match="not started"):
        consumer.receive(30)
    with pytest.raises(ClosedError, match="not started"):
        take(consumer, 1)


def test_a_consumer_is_started_once(client: Any) -> None:
    with (
        client.consumer("g", ["test"], **IDLE) as consumer,
        pytest.raises(ClosedError, match="started only once"),
    ):
        consumer.start()
    with pytest.raises(ClosedError, match="started only once"):
        consumer.start()


def test_after_closing_a_loop_ends_and_a_call_is_refused(
    broker: Any, client: Any
) -> None:
    broker.put(*numbered(0, 3))
    with client.consumer("g", ["test"], **IDLE) as consumer:
        take(consumer, 1)
    assert list(itertools.islice(consumer, 1)) == []
    with pytest.raises(ClosedError, match="closed"):
        consumer.receive(30)
    with pytest.raises(ClosedError, match="not assigned"):
        consumer.seek(ZERO, Offset(0))


def test_a_consumer_that_cannot_start_leaves_nothing_running(
    java: Any, java_client: Any
) -> None:
    """Its store cannot be read: no fetcher goes on after the error."""
    java.put(b"m")

    class Broken(MemoryOffsets):
        is_closed = False

        async def load(self, *_args: Any, **_named: Any) -> Any:
            raise MetaqError("the disk is gone")

        async def close(self) -> None:
            self.is_closed = True

    java_client.partitions("test")
    store = Broken()
    consumer = java_client.consumer("g", ["test"], offsets=store, **IDLE)
    with pytest.raises(MetaqError, match="the disk is gone"):
        consumer.start()
    assert store.is_closed
    assert consumer.health().state is ConsumerState.CLOSED
    assert consumer.assignment() == frozenset()
    assert java.inner.statistics().commands["get"] == 0
