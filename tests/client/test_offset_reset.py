"""Offset reset: committed, earliest, latest, a time, an offset, a mapping."""

import asyncio
import logging
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from metaq.client import Client
from metaq.client.errors import CannotAnswerError
from metaq.client.offsets.offset_store import MemoryOffsets
from metaq.client.options import Start
from metaq.errors import MetaqError, NoBrokerError
from metaq.model import GroupOffset, LogId, MessageId, Offset
from metaq.testing.fake_broker import FakeBroker
from tests.brokers import PYTHON, StartBroker, broker_of
from tests.client.worlds import IDLE, QUICK, partition, payloads, take
from tests.rigs.inside import subscription_of, twin_of
from tests.rigs.waiting import wait_until

ONE_BROKER = {
    "test_a_time_between_two_messages_begins_at_the_second_or_before": "needs times",
    "test_a_committed_offset_below_the_log_is_given_up_aloud": "its start moves",
    "test_what_was_handled_before_it_was_deleted_is_no_loss": "its start moves",
    "test_a_committed_offset_of_a_partition_without_a_log_is_given_up_aloud": "says it "
    "in other words",
    "test_what_a_metaq_1_4_broker_forgot_at_its_start_is_read_on": "ours forget none",
    "test_another_log_of_a_metaq_1_4_broker_is_read_from_its_start": "likewise",
    "test_what_was_handled_of_a_log_that_is_gone_hides_nothing_of_the_next_one": (
        "another log takes its place"
    ),
}

ZERO, ONE = partition(0, "two"), partition(1, "two")


@pytest.fixture
def broker(start_broker: StartBroker) -> Any:
    return start_broker({"test": 1, "two": 2})


@pytest.fixture
def client(broker: Any) -> Iterator[Client]:
    with Client(brokers=[broker.address], **QUICK) as one:
        yield one


def first(client: Client, topic: str, store: Any = None, **options: Any) -> Any:
    """Return the first message that a consumer of one partition is given."""
    with client.consumer("g", [topic], offsets=store, **IDLE | options) as consumer:
        message = consumer.receive(30)
        assert message is not None
        return message.data


def remember(store: MemoryOffsets, offset: Offset) -> None:
    """Commit an offset of group `g`, without an id; also where commits fail by now."""
    stored = {partition(): GroupOffset(offset, MessageId(-1))}
    commit = MemoryOffsets.commit(store, "g", stored, fence=None, deadline_s=0.0)
    asyncio.run(commit)


def test_a_new_group_begins_at_the_log_start(broker: Any, client: Client) -> None:
    broker.put(b"0", b"1")
    assert first(client, "test") == b"0"


def test_a_new_group_that_wants_the_latest_gets_what_comes(
    broker: Any, client: Client
) -> None:
    broker.put(b"0", b"1")
    with client.consumer("g", ["test"], start="latest", **IDLE) as consumer:
        wait_until(consumer.assignment)
        assert consumer.receive(0.05) is None
        broker.put(b"2")
        assert payloads(take(consumer, 1)) == [b"2"]


def test_the_latest_is_remembered_although_nothing_was_read(
    broker: Any, client: Client
) -> None:
    """Messages between two runs of a new group are not passed over."""
    broker.put(b"0")
    store = MemoryOffsets()
    options: dict[str, Any] = {"offsets": store, "start": "latest", **IDLE}
    with client.consumer("g", ["test"], **options) as consumer:
        wait_until(consumer.assignment)
        assert consumer.receive(0.05) is None
    broker.put(b"1")
    assert first(client, "test", store, start="latest") == b"1"


def test_an_empty_partition_begins_at_its_first_message(
    broker: Any, client: Client
) -> None:
    with client.consumer("g", ["test"], start="latest", **IDLE) as consumer:
        wait_until(consumer.assignment)
        assert consumer.receive(0.05) is None
        broker.put(b"0")
        assert payloads(take(consumer, 1)) == [b"0"]


def test_a_committed_offset_comes_before_the_start(broker: Any, client: Client) -> None:
    offsets = broker.put(b"0", b"1", b"2")
    store = MemoryOffsets()
    remember(store, offsets[1])
    assert first(client, "test", store, start="earliest") == b"1"
    ignoring = {"start": offsets[2], "ignore_committed": True}
    assert first(client, "test", store, **ignoring) == b"2"


def test_an_offset_is_kept_within_the_log(broker: Any, client: Client) -> None:
    offsets = broker.put(b"0", b"1", b"2")
    assert first(client, "test", start=offsets[1]) == b"1"
    assert first(client, "test", start=Offset(0)) == b"0"
    with client.consumer("g", ["test"], start=Offset(2**62), **IDLE) as consumer:
        wait_until(consumer.assignment)
        state = subscription_of(twin_of(consumer))
        wait_until(lambda: state.status_of(partition()).reached < 2**62)
        assert consumer.receive(0.05) is None
        broker.put(b"3")
        assert payloads(take(consumer, 1)) == [b"3"]


def test_a_mapping_says_it_for_each_and_the_rest_begins_at_the_log_start(
    broker: Any, client: Client
) -> None:
    broker.put(b"0", b"1", topic="two", partition=0)
    offsets = broker.put(b"0", b"1", b"2", topic="two", partition=1)
    start: Start = {ONE: offsets[2]}
    with client.consumer("g", ["two"], start=start, **IDLE) as consumer:
        found = take(consumer, 3)
    assert [m.data for m in found if m.partition == ZERO] == [b"0", b"1"]
    assert [m.data for m in found if m.partition == ONE] == [b"2"]


def test_a_time_begins_at_the_first_message_of_it_or_cannot_be_answered(
    broker: Any, client: Client
) -> None:
    broker.put(*(b"%d" % number for number in range(3)))
    moment = datetime(2020, 1, 1, tzinfo=UTC)
    future = datetime(2100, 1, 1, tzinfo=UTC)
    client.partitions("test")
    if not broker.has_extensions:
        with pytest.raises(CannotAnswerError, match=r"test/0-0: .* no times"):
            first(client, "test", start=moment)
        return
    assert first(client, "test", start=moment) == b"0"
    with client.consumer("g", ["test"], start=future, **IDLE) as consumer:
        wait_until(consumer.assignment)
        assert consumer.receive(0.05) is None
        broker.put(b"3")
        assert payloads(take(consumer, 1)) == [b"3"]


def test_a_time_between_two_messages_begins_at_the_second_or_before(
    tmp_path: Path,
) -> None:
    with broker_of(PYTHON, tmp_path / "data", {"test": 1}) as broker:
        broker.put(b"old")
        with Client(brokers=[broker.address], **QUICK) as client:
            stamped = _stamp(client)
            while True:
                broker.put(b"new")
                newest = [m.timestamp for m in client.browse("test")][-1]
                assert newest is not None
                if newest > stamped:
                    break
            start = datetime.fromtimestamp(newest, UTC)
            with client.consumer("g", ["test"], start=start) as consumer:
                timestamps = [m.timestamp for m in take(consumer, 1)]
            # Never later than asked for; earlier by at most one span of the index.
            assert timestamps[0] is not None
            assert timestamps[0] <= newest


def _stamp(client: Client) -> float:
    message = next(iter(client.browse("test")))
    assert message.timestamp is not None
    return message.timestamp


@pytest.mark.parametrize(
    ("start", "wanted"), [("earliest", b"2"), ("latest", None), (Offset(1), b"2")]
)
def test_a_committed_offset_below_the_log_is_given_up_aloud(
    start_metaq_1_4: StartBroker,
    caplog: pytest.LogCaptureFixture,
    start: Any,
    wanted: bytes | None,
) -> None:
    """Messages that were deleted unread are an error in the log, and counted."""
    broker: Any = start_metaq_1_4()
    offsets = broker.put(b"0", b"1")
    broker.inner.roll()
    (log_start,) = broker.put(b"2")
    broker.inner.trim()
    store = MemoryOffsets()
    remember(store, offsets[1])
    options = {"offsets": store, "start": start, **IDLE}
    with Client(brokers=[broker.address], **QUICK) as client:
        client.partitions("test")
        with (
            caplog.at_level(logging.ERROR),
            client.consumer("g", ["test"], **options) as consumer,
        ):
            wait_until(lambda: consumer.statistics().reset_count)
            message = consumer.receive(30 if wanted else 0.05)
            assert (message and message.data) == wanted
            assert consumer.statistics().reset_count == 1
            passed_over = consumer.statistics().missing_bytes
    missing = log_start - offsets[1]
    # A group that begins at the latest offset passes over what is there as well.
    assert passed_over == missing if wanted else passed_over > missing
    assert f"{missing} bytes were deleted before they were read" in caplog.text
    assert f"committed={offsets[1]} log_start={log_start}" in caplog.text


class Broken(MemoryOffsets):
    """Offsets that cannot be committed."""

    async def commit(self, *_args: Any, **_named: Any) -> Any:
        raise MetaqError("the session is lost")


@pytest.mark.parametrize("committed", [None, Offset(0)])
def test_what_was_handled_of_a_log_that_is_gone_hides_nothing_of_the_next_one(
    caplog: pytest.LogCaptureFixture, committed: Offset | None
) -> None:
    """No commit says how far that was, and its messages were taken for repeats."""
    options: dict[str, Any] = {"offsets": Broken(), **IDLE}
    if committed is not None:
        remember(options["offsets"], committed)
    with FakeBroker() as broker:
        for payload in (b"0", b"1", b"2"):
            broker.add(payload)
        client = Client(brokers=[str(broker.address)], **QUICK)
        with client:
            with client.consumer("g", ["test"], **options) as consumer:
                assert payloads(take(consumer, 3)) == [b"0", b"1", b"2"]
            broker.stop()
            other = FakeBroker()
            other.port = broker.port
            with other, caplog.at_level(logging.ERROR):
                other.add(b"new")
                with client.consumer("g", ["test"], **options) as consumer:
                    assert payloads(take(consumer, 1)) == [b"new"]
                    assert consumer.statistics().reset_count == 1
    assert "handled offset is outside the log: partition=test/0-0" in caplog.text


@pytest.mark.parametrize("start", ["earliest", "latest"])
def test_what_was_handled_before_it_was_deleted_is_no_loss(
    start_metaq_1_4: StartBroker, caplog: pytest.LogCaptureFixture, start: Any
) -> None:
    """The commit failed, the segment went: nothing is missing, nothing comes again."""
    broker: Any = start_metaq_1_4()
    offsets = broker.put(b"0", b"1")
    broker.inner.roll()
    broker.put(b"2", b"3")
    store = Broken()
    remember(store, offsets[0])
    options: dict[str, Any] = {"offsets": store, "start": start, **IDLE}
    with Client(brokers=[broker.address], **QUICK) as client:
        with client.consumer("g", ["test"], **options) as consumer:
            assert payloads(take(consumer, 3)) == [b"0", b"1", b"2"]
        broker.inner.trim()
        with (
            caplog.at_level(logging.ERROR),
            client.consumer("g", ["test"], **options) as consumer,
        ):
            assert payloads(take(consumer, 1)) == [b"3"]
            assert consumer.statistics().repeat_count == 1
            assert consumer.statistics().reset_count == 0
    assert "outside the log" not in caplog.text


def test_a_committed_offset_behind_the_log_is_given_up_aloud(
    broker: Any, client: Client, caplog: pytest.LogCaptureFixture
) -> None:
    """Another log, or a broker that lost data: reading begins at its start."""
    broker.put(b"0", b"1")
    store = MemoryOffsets()
    remember(store, Offset(10**9))
    with caplog.at_level(logging.ERROR):
        assert first(client, "test", store) == b"0"
    assert "the log was replaced, or cut by a broker that lost data" in caplog.text


@pytest.mark.slow
def test_a_committed_offset_of_a_partition_without_a_log_is_given_up_aloud(
    broker: Any, client: Client, caplog: pytest.LogCaptureFixture
) -> None:
    """Its topic was made again: the first messages are before that offset.

    A MetaQ 1.4 broker may have forgotten the log: its end is known by the next put.
    """
    store = MemoryOffsets()
    remember(store, Offset(460))
    options: dict[str, Any] = {"offsets": store, "start": "latest", **IDLE}
    with (
        caplog.at_level(logging.ERROR),
        client.consumer("g", ["test"], **options) as consumer,
    ):
        wait_until(consumer.assignment)
        broker.put(b"0")
        assert payloads(take(consumer, 1)) == [b"0"]
        assert consumer.statistics().reset_count == 1
    known = broker.kind == PYTHON
    outside = "committed=460 log_start=0 log_end=0 next=0" if known else "old=460 new=0"
    assert outside in caplog.text


@pytest.mark.slow
@pytest.mark.parametrize("is_redirected", [True, False])
def test_what_a_metaq_1_4_broker_forgot_at_its_start_is_read_on(
    start_metaq_1_4: StartBroker,
    caplog: pytest.LogCaptureFixture,
    *,
    is_redirected: bool,
) -> None:
    """It knows the partition again with the next put; nothing comes again."""
    broker: Any = start_metaq_1_4()
    fake = broker.inner.metaq
    fake.does_redirect = is_redirected
    offsets = broker.put(b"0", b"1")
    store = MemoryOffsets()
    remember(store, offsets[1])
    forgotten = fake.logs.pop(LogId("test", 0))
    with (
        Client(brokers=[broker.address], **QUICK) as client,
        client.consumer("g", ["test"], offsets=store, **IDLE) as consumer,
    ):
        wait_until(consumer.assignment)
        assert consumer.receive(0.2) is None
        fake.logs[LogId("test", 0)] = forgotten
        assert payloads(take(consumer, 1)) == [b"1"]
        assert consumer.statistics().reset_count == 0
    assert "knows no log of a partition" in caplog.text


@pytest.mark.parametrize("is_redirected", [True, False])
def test_another_log_of_a_metaq_1_4_broker_is_read_from_its_start(
    start_metaq_1_4: StartBroker, *, is_redirected: bool
) -> None:
    """It gave 404 when reading began, and the next put made a log there."""
    broker: Any = start_metaq_1_4()
    broker.inner.metaq.does_redirect = is_redirected
    store = MemoryOffsets()
    remember(store, Offset(460))
    with (
        Client(brokers=[broker.address], **QUICK) as client,
        client.consumer("g", ["test"], offsets=store, **IDLE) as consumer,
    ):
        wait_until(consumer.assignment)
        broker.put(b"0", b"1")
        assert payloads(take(consumer, 2)) == [b"0", b"1"]
        assert consumer.statistics().reset_count == 1


def test_a_committed_offset_is_not_given_up_for_a_broker_without_the_partition(
    client: Client,
) -> None:
    """It was committed of another broker, or the topic is gone."""
    other, store = partition(7), MemoryOffsets()
    stored = {other: GroupOffset(Offset(460), MessageId(-1))}
    asyncio.run(store.commit("g", stored, fence=None, deadline_s=0.0))
    options: dict[str, Any] = {"offsets": store, "partitions": ["0-7"], **IDLE}
    with (
        pytest.raises(NoBrokerError, match=r"460 is committed, but broker 0 has no"),
        client.consumer("g", ["test"], **options),
    ):
        pass
    loaded = asyncio.run(store.load("g", other, deadline_s=0.0))
    assert loaded == stored[other]


def test_a_rollback_before_the_first_commit_goes_back_to_where_reading_began(
    broker: Any, client: Client
) -> None:
    """Not to where the user's choice leads by now: that would pass over messages."""
    broker.put(b"0")
    options: dict[str, Any] = {"start": "latest", "commit_interval_s": None, **IDLE}
    with client.consumer("g", ["test"], **options) as consumer:
        wait_until(consumer.assignment)
        broker.put(b"1", b"2")
        assert payloads(take(consumer, 2)) == [b"1", b"2"]
        consumer.rollback()
        assert payloads(take(consumer, 2)) == [b"1", b"2"]


def test_a_rollback_ignores_what_was_committed_before_if_reading_did(
    broker: Any, client: Client
) -> None:
    offsets = broker.put(*(b"%d" % n for n in range(5)))
    store = MemoryOffsets()
    first(client, "test", store)
    options: dict[str, Any] = {"ignore_committed": True, "commit_interval_s": None}
    with client.consumer(
        "g", ["test"], offsets=store, start=offsets[3], **options, **IDLE
    ) as consumer:
        assert payloads(take(consumer, 2)) == [b"3", b"4"]
        consumer.rollback()
        assert payloads(take(consumer, 1)) == [b"3"]
        consumer.commit()
        consumer.rollback()
        assert payloads(take(consumer, 1)) == [b"4"]


def test_who_ignores_what_is_committed_is_handed_what_was_handled_before(
    broker: Any, client: Client
) -> None:
    """Also what this process has handled and could not commit."""
    broker.put(b"0", b"1")

    class Broken(MemoryOffsets):
        async def commit(self, *_args: Any, **_named: Any) -> Any:
            raise MetaqError("the disk is gone")

    with client.consumer("g", ["test"], offsets=Broken(), **IDLE) as consumer:
        take(consumer, 2)
    assert first(client, "test", ignore_committed=True) == b"0"
