"""Topics, partitions, statistics and messages, read without a group."""

import asyncio
import gc
import itertools
from collections.abc import Awaitable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from metaq.client import AsyncClient, Client
from metaq.client.cluster.metadata import AddressMetadata
from metaq.client.consume import browse
from metaq.client.consume.browse import stats_of
from metaq.errors import ConfigError, CorruptRecordError, MetaqError, NoBrokerError
from metaq.model import Offset
from metaq.testing.fake_broker import FaultKind
from tests.brokers import StartBroker
from tests.client.worlds import QUICK, WORLDS, partition, parts_of, payloads
from tests.rigs.waiting import wait_until

ONE_BROKER = {"java": "damage, faults on cue, a log whose start moves"}


@pytest.fixture
def broker(start_broker: StartBroker) -> Any:
    return start_broker({"test": 1, "two": 2})


@pytest.fixture(params=["sync", "async"])
def client(request: pytest.FixtureRequest, broker: Any) -> Iterator[Any]:
    with WORLDS[request.param](brokers=[broker.address], **QUICK) as one:
        yield one


@pytest.fixture
def java(start_metaq_1_4: StartBroker) -> Any:
    return start_metaq_1_4()


@pytest.fixture(params=["sync", "async"])
def java_client(request: pytest.FixtureRequest, java: Any) -> Iterator[Any]:
    options = {**QUICK, "request_timeout_s": 5.0}
    with WORLDS[request.param](brokers=[java.address], **options) as one:
        yield one


def test_browsing_goes_through_the_partitions_one_after_the_other(
    broker: Any, client: Any
) -> None:
    for number in (1, 0):
        broker.put(b"a", b"b", b"c", topic="two", partition=number)
    found = list(client.browse("two"))
    assert payloads(found) == [b"a", b"b", b"c"] * 2
    assert [m.partition.partition for m in found] == [0, 0, 0, 1, 1, 1]


def test_a_partition_without_messages_is_none_when_its_broker_goes_meanwhile(
    broker: Any,
) -> None:
    """It was there when reading began; there is nothing to read, and no error."""
    broker.put(b"a", topic="two", partition=0)
    with Client(coordinator=broker.zookeeper.coordinator) as client:
        messages = client.browse("two")
        assert next(messages).data == b"a"
        for path in [
            path for path in broker.zookeeper.tree() if path.endswith("/two/0-m")
        ]:
            broker.zookeeper.remove(path)
        wait_until(lambda: not parts_of(client).metadata.snapshot.puts.get("two"))
        assert list(messages) == []


def test_browsing_ends_where_the_log_ended_when_it_began(
    broker: Any, client: Any
) -> None:
    broker.put(b"a", b"b", topic="two", partition=0)
    broker.put(b"c", topic="two", partition=1)
    messages = client.browse("two")
    assert next(messages).data == b"a"
    for number in (0, 1):
        broker.put(b"later", topic="two", partition=number)
    assert payloads(list(messages)) == [b"b", b"c"]


def test_browsing_reads_the_chosen_partitions_from_the_chosen_start(
    broker: Any, client: Any
) -> None:
    broker.put(b"a", topic="two", partition=0)
    offsets = broker.put(b"b", b"c", topic="two", partition=1)
    found = client.browse("two", partitions=["0-1"], start=offsets[1])
    assert payloads(list(found)) == [b"c"]
    assert list(client.browse("two", start="latest")) == []
    for name in ("1", "0-x", "two/0-1"):
        with pytest.raises(ConfigError, match="expected a name as '0-3', got"):
            list(client.browse("two", partitions=[name]))


@pytest.mark.slow
def test_an_empty_topic_has_no_messages_and_an_unknown_one_no_broker(
    broker: Any, client: Any
) -> None:
    assert list(client.browse("test")) == []
    client_options = {**QUICK, "request_timeout_s": 0.5}
    with (
        Client(brokers=[broker.address], **client_options) as other,
    ):
        assert other.topics(timeout=30)  # the broker has answered
        with pytest.raises(NoBrokerError, match="no broker serves topic 'nothing'"):
            list(other.browse("nothing"))


@pytest.mark.slow
def test_finding_the_topic_takes_from_the_time_of_the_first_messages(
    broker: Any, client: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits_s: list[float | None] = []
    find = AddressMetadata.topic

    async def within(limit_s: float | None, work: Awaitable[Any], _what: str) -> Any:
        limits_s.append(limit_s)
        return await work

    async def topic(self: AddressMetadata, name: str, **named: Any) -> Any:
        await asyncio.sleep(0.1)
        return await find(self, name, **named)

    monkeypatch.setattr(browse, "within", within)
    monkeypatch.setattr(AddressMetadata, "topic", topic)
    for number in (0, 1):
        broker.put(b"a", topic="two", partition=number)
    assert len(list(client.browse("two", timeout=30))) == 2
    first_s, *others_s = limits_s
    assert first_s is not None
    assert 0 < first_s < 29.95
    assert others_s == [30, 30]


@pytest.mark.slow
def test_following_goes_on_for_ever_with_all_partitions(
    broker: Any, client: Any
) -> None:
    broker.put(b"a", topic="two", partition=0)
    messages = client.browse("two", stop_at_end=False)
    assert next(messages).data == b"a"
    broker.put(b"b", topic="two", partition=1)
    assert next(messages).data == b"b"
    messages.close()
    assert list(messages) == []


def test_following_chosen_partitions_sees_no_other(broker: Any, client: Any) -> None:
    messages = client.browse("two", partitions=["0-1"], stop_at_end=False)
    broker.put(b"no", topic="two", partition=0)
    broker.put(b"yes", topic="two", partition=1)
    assert next(messages).data == b"yes"
    messages.close()


def test_a_browser_that_is_left_behind_does_not_keep_the_client_from_closing(
    broker: Any, caplog: pytest.LogCaptureFixture
) -> None:
    broker.put(b"a")
    with WORLDS["sync"](brokers=[broker.address], **QUICK) as client:
        left = client.browse("test", stop_at_end=False)
        assert next(left).data == b"a"
    with pytest.raises(MetaqError, match="closed"):
        next(left)
    assert "asyncio" not in {record.name for record in caplog.records}


@pytest.mark.parametrize("options", [{}, {"last": 1}, {"partitions": ["0-0"]}])
def test_a_browser_that_is_left_open_ends_with_its_loop(
    broker: Any, caplog: pytest.LogCaptureFixture, options: dict[str, Any]
) -> None:
    """The loop closes its generators at once, and complained of one in another."""
    broker.put(b"a")
    left: list[Any] = []

    async def scenario() -> None:
        async with AsyncClient(brokers=[broker.address], **QUICK) as client:
            left.append(client.browse("test", stop_at_end=False, **options))
            assert (await anext(left[0])).data == b"a"

    asyncio.run(scenario())
    assert "asyncio" not in {record.name for record in caplog.records}


def test_a_log_whose_start_was_deleted_is_read_from_where_it_begins(
    java: Any, java_client: Any
) -> None:
    """MetaQ's browser passes over the whole partition."""
    java.put(b"a")
    java.inner.roll()
    java.put(b"b", b"c")
    java.inner.trim()
    assert payloads(list(java_client.browse("test"))) == [b"b", b"c"]


def test_a_log_that_is_deleted_under_the_browser_ends_it(
    java: Any, java_client: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """And it says so: a reader that retention overtakes had a hole without a word."""
    java.inner.metaq.transfer_bytes_max = 30
    _, _, lost = java.put(b"a", b"b", b"c")
    messages = java_client.browse("test")
    assert next(messages).data == b"a"
    wait_until(lambda: gets_of(java) == 2)
    java.inner.roll()
    (log_start,) = java.put(b"d")
    java.inner.trim()
    assert payloads(list(messages)) == [b"b"]
    assert f"old={lost} new={log_start}: {log_start - lost} bytes were" in caplog.text


def test_what_is_deleted_before_the_turn_of_its_partition_is_reported(
    java: Any, java_client: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """A whole partition was passed over without a word."""
    java.put(b"a", topic="two")
    (lost,) = java.put(b"lost", topic="two", partition=1)
    messages = java_client.browse("two")
    assert next(messages).data == b"a"
    java.inner.roll("two", 1)
    (log_start,) = java.put(b"late", topic="two", partition=1)
    java.inner.trim("two", 1)
    assert payloads(list(messages)) == []
    assert f"partition=two/0-1 old={lost} new={log_start}: " in caplog.text


def test_a_browser_with_a_get_ahead_ends_with_its_client(
    java: Any, caplog: pytest.LogCaptureFixture
) -> None:
    java.inner.metaq.transfer_bytes_max = 30
    java.put(b"a", b"b", b"c")
    java.inner.inject(FaultKind.SWALLOW, verb="get", after=1)
    options = {**QUICK, "close_timeout_s": 0.05}
    with Client(brokers=[java.address], **options) as client:
        left = client.browse("test")
        assert next(left).data == b"a"
        wait_until(lambda: gets_of(java) == 2)
    gc.collect()
    assert "asyncio" not in {record.name for record in caplog.records}
    with pytest.raises(MetaqError, match="closed"):
        next(left)


def gets_of(java: Any) -> int:
    count: int = java.inner.statistics().commands.get("get", 0)
    return count


def test_one_get_is_ahead_of_the_caller_and_no_more(
    java: Any, java_client: Any
) -> None:
    java.inner.metaq.transfer_bytes_max = 30
    java.put(b"a", b"b", b"c", b"d")
    messages = java_client.browse("test")
    assert next(messages).data == b"a"
    wait_until(lambda: gets_of(java) == 2)
    assert next(messages).data == b"b"
    wait_until(lambda: gets_of(java) == 3)
    assert payloads(list(messages)) == [b"c", b"d"]
    assert gets_of(java) == 4


@pytest.mark.slow
@pytest.mark.parametrize("world", ["sync", "async"])
def test_an_outage_met_ahead_of_the_caller_may_be_over(java: Any, world: str) -> None:
    java.inner.metaq.transfer_bytes_max = 30
    java.put(b"a", b"b")
    java.inner.inject(FaultKind.SWALLOW, verb="get", after=1)
    options = {**QUICK, "request_timeout_s": 1.5}
    with WORLDS[world](brokers=[java.address], **options) as client:
        assert payloads(list(client.browse("test"))) == [b"a", b"b"]


@pytest.mark.slow
def test_an_outage_that_goes_on_is_told(java: Any) -> None:
    java.inner.metaq.transfer_bytes_max = 30
    java.put(b"a", b"b", b"c")
    options = {**QUICK, "request_timeout_s": 1.5}
    with WORLDS["sync"](brokers=[java.address], **options) as client:
        messages = client.browse("test")
        assert next(messages).data == b"a"
        java.inner.go_away()
        with pytest.raises(MetaqError, match="cannot connect"):
            list(messages)


def test_a_message_larger_than_a_transfer_is_not_passed_over(
    java: Any, java_client: Any
) -> None:
    """MetaQ's browser stops there, without a word."""
    java.inner.metaq.transfer_bytes_max = 100
    large = bytes(range(256)) * 8
    java.put(b"a", large, b"b")
    assert payloads(list(java_client.browse("test"))) == [b"a", large, b"b"]


def test_damage_ends_browsing_behind_what_is_good(java: Any, java_client: Any) -> None:
    offsets = java.put(b"a", b"b", b"c")
    java.inner.corrupt(offsets[1])
    messages = java_client.browse("test")
    assert next(messages).data == b"a"
    with pytest.raises(CorruptRecordError, match=f"offset {offsets[1]}"):
        next(messages)


@pytest.mark.slow
def test_browsing_survives_lost_connections(java: Any, java_client: Any) -> None:
    java.inner.metaq.transfer_bytes_max = 60
    wanted = [b"%d" % number for number in range(20)]
    java.put(*wanted)
    java.inner.inject(FaultKind.DROP, verb="get", after=3, count=2)
    java.inner.inject(FaultKind.REFUSE, verb="get", after=7, status=503)
    assert payloads(list(java_client.browse("test"))) == wanted


# -- get ------------------------------------------------------------------------------


def test_get_gives_messages_and_where_to_go_on(broker: Any, client: Any) -> None:
    offsets = broker.put(b"a", b"b", b"c")
    result = client.get("test", "0-0", offsets[1])
    assert payloads(result.messages) == [b"b", b"c"]
    end = result.next_offset
    assert not result.is_moved
    at_end = client.get("test", "0-0", end)
    assert (at_end.messages, at_end.next_offset, at_end.is_moved) == ([], end, False)
    record = offsets[1] - offsets[0]
    few = client.get("test", "0-0", offsets[0], record + 5)
    assert payloads(few.messages) == [b"a"]
    assert few.next_offset == offsets[1]


def test_get_gives_a_message_larger_than_was_asked_for(
    broker: Any, client: Any
) -> None:
    large = bytes(5000)
    offset, _ = broker.put(large, b"b")
    assert client.get("test", "0-0", offset, 100).messages[0].data == large


def test_get_tells_where_the_log_is(java: Any, java_client: Any) -> None:
    java.put(b"a")
    java.inner.roll()
    (start,) = java.put(b"b")
    java.inner.trim()
    result = java_client.get("test", "0-0", Offset(0))
    assert (result.messages, result.next_offset, result.is_moved) == ([], start, True)
    with pytest.raises(ConfigError, match="max_bytes: expected 1 to 2147483647, got 0"):
        java_client.get("test", "0-0", start, 0)
    with pytest.raises(ConfigError, match="got '0'"):
        java_client.get("test", "0", start)


def test_get_behind_the_end_tells_where_the_end_is(broker: Any, client: Any) -> None:
    """It is no offset to wait at: what is put there may begin anywhere."""
    broker.put(b"a", topic="two", partition=0)
    end = client.get("two", "0-0", Offset(0)).next_offset
    for name, log_end in (("0-0", end), ("0-1", 0)):
        result = client.get("two", name, Offset(log_end + 1))
        assert (result.messages, result.next_offset) == ([], log_end)
        assert result.is_moved


def test_a_partition_that_there_is_not_is_no_empty_one(
    broker: Any, client: Any
) -> None:
    """Nor is it waited for: the name is mistyped."""
    broker.put(b"a", topic="two", partition=0)
    wanted = r"two/0-2: no broker serves it; partitions of topic 'two': two/0-0, two/0"
    for ask in (
        lambda: client.get("two", "0-2", Offset(0)),
        lambda: list(client.browse("two", partitions=["0-0", "0-2"])),
        lambda: next(client.browse("two", partitions=["0-2"], stop_at_end=False)),
    ):
        with pytest.raises(NoBrokerError, match=wanted):
            ask()
    assert payloads(client.browse("two", partitions=["0-1"])) == []


def test_get_of_a_refused_partition_is_an_error(java: Any, java_client: Any) -> None:
    java.put(b"a")
    java.inner.close_partition()
    with pytest.raises(MetaqError):
        java_client.get("test", "0-0", Offset(0), timeout=5)


# -- topics, partitions, statistics ---------------------------------------------------


def test_topics_and_partitions_are_listed_in_numeric_order(
    broker: Any, client: Any
) -> None:
    broker.create_topic("many", 11)
    broker.put(b"m", topic="many", partition=10)
    wait_until(lambda: "many" in client.topics())
    assert set(client.topics()) >= {"test", "two", "many"}
    assert client.topics() == tuple(sorted(client.topics()))
    wait_until(lambda: len(client.partitions("many")) == 11)
    assert client.partitions("many") == tuple(partition(n, "many") for n in range(11))
    assert client.partitions("nothing") == ()


@pytest.mark.slow
def test_topics_and_partitions_come_from_zookeeper_too(broker: Any) -> None:
    for world in WORLDS.values():
        with world(**broker.client_options) as client:
            assert client.topics() == ("test", "two")  # waits for ZooKeeper
            wait_until(lambda: len(client.partitions("two")) == 2)
            assert client.partitions("nothing") == ()
            assert list(client.stats()) == [broker.address]


def test_stats_are_names_and_values_of_each_broker(broker: Any, client: Any) -> None:
    broker.put(b"a")
    (found,) = client.stats().items()
    assert found[0] == broker.address
    assert found[1]["broker_id"] == "0"
    assert "STATS" not in found[1]
    assert client.stats("topics")[broker.address]["test"].startswith("partitions 1")


def test_a_broker_that_refuses_stats_is_left_out(java: Any, java_client: Any) -> None:
    java_client.topics()
    java.inner.inject(FaultKind.REFUSE, verb="stats", count=1000)
    assert java_client.stats() == {}


def test_a_broker_that_cannot_be_asked_ends_the_questions_to_the_others() -> None:
    ended: list[str] = []

    async def get(address: str, *, deadline_s: float) -> None:
        if address == "absent":
            raise NoBrokerError(f"{address} until {deadline_s}")
        try:
            await asyncio.sleep(60)
        finally:
            ended.append(address)

    brokers = {
        number: SimpleNamespace(leader=leader, followers={})
        for number, leader in enumerate(("silent", "absent", "mute"))
    }
    snapshot = SimpleNamespace(version=1, brokers=brokers)

    async def wait_newer(_version: int, **_named: float) -> Any:
        return snapshot

    context: Any = SimpleNamespace(
        metadata=SimpleNamespace(wait_newer=wait_newer), pool=SimpleNamespace(get=get)
    )

    async def scenario() -> None:
        with pytest.raises(NoBrokerError, match="absent"):
            await stats_of(context, "", deadline_s=1.0)
        assert sorted(ended) == ["mute", "silent"]

    asyncio.run(scenario())


@pytest.mark.slow
def test_a_long_log_is_browsed_whole(broker: Any, client: Any) -> None:
    wanted = [b"%06d" % number + bytes(200) for number in range(8000)]
    broker.put(*wanted)
    numbers = (int(m.data[:6]) for m in client.browse("test"))
    assert list(itertools.islice(numbers, 9000)) == list(range(8000))
