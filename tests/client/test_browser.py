"""Reading without a group, and finding an offset by time."""

import itertools
import threading

import pytest

from metaq.client.browser import TopicBrowser
from metaq.client.discovery import Cluster
from metaq.client.errors import NoWallTimeError
from metaq.client.seek import id_time, offset_at
from metaq.clock import SystemClock
from metaq.errors import CorruptRecordError, NoBrokerError, RequestTimeoutError
from metaq.model import BrokerId, MessageId, Millis, Offset, TopicPartition
from metaq.protocol.commands import Get
from metaq.protocol.version import Capabilities
from tests.client.memory_broker import JAVA, OURS, MemoryBroker, id_at

ID = BrokerId(7)
P0, P1 = TopicPartition("t", ID, 0), TopicPartition("t", ID, 1)
NOW = 1_800_000_000_000


def browse(broker: MemoryBroker) -> TopicBrowser:
    cluster = Cluster({ID: broker.address})
    return TopicBrowser(cluster, timeout_s=5, clock=SystemClock())


def read_all(broker: MemoryBroker, partition: TopicPartition) -> list[bytes]:
    with browse(broker) as browser:
        return [m.data for ms in browser.read(partition, Offset(0)) for m in ms]


def test_a_partition_is_read_over_its_segments_to_its_end() -> None:
    """Slices that end in the middle of records and segments give every message."""
    with MemoryBroker() as broker:
        broker.transfer_max = 50
        wanted = [b"m%d" % n for n in range(40)]
        for n, payload in enumerate(wanted):
            broker.add(payload)
            if n % 7 == 0:
                broker.roll()
        assert read_all(broker, P0) == wanted


def test_a_record_above_the_transfer_limit_of_the_broker_is_read() -> None:
    """A broker takes larger records than it sends at once; they are still read."""
    with MemoryBroker() as broker:
        broker.transfer_max = 50
        wanted = [b"a", bytes(range(200)), b"b"]
        for payload in wanted:
            broker.add(payload)
        assert read_all(broker, P0) == wanted


def test_a_partition_that_nobody_wrote_to_is_empty() -> None:
    """No log on the broker's disk is no messages, not an error."""
    with MemoryBroker() as broker:
        assert read_all(broker, P1) == []


def test_reading_starts_at_the_log_start_after_retention() -> None:
    """Where offset 0 is gone the first retained message comes first."""
    with MemoryBroker() as broker:
        broker.starts["t", 0] = 5000
        broker.add(b"kept")
        assert read_all(broker, P0) == [b"kept"]


def test_damage_ends_reading_with_an_error_after_what_is_good() -> None:
    """A damaged record is named; messages before it were handed out."""
    with MemoryBroker() as broker, browse(broker) as browser:
        broker.add(b"good")
        offset = broker.add(b"bad")
        broker.segments["t", 0][-1][-1] ^= 1
        got = []
        with pytest.raises(CorruptRecordError, match=f"offset {offset}"):
            got += [m.data for ms in browser.read(P0, Offset(0)) for m in ms]
        messages = browser.read(P0, Offset(0))
        assert [m.data for m in next(messages)] == [b"good"]


@pytest.mark.parametrize("capabilities", [OURS, JAVA])
def test_followers_see_messages_of_all_partitions_as_they_come(
    capabilities: Capabilities, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With and without a long poll new messages arrive, in order per partition."""
    monkeypatch.setattr("metaq.client.browser.POLL_INTERVAL_S", 0.01)
    with MemoryBroker(capabilities) as broker, browse(broker) as browser:
        broker.add(b"old", partition=1)
        followed = browser.follow([(P0, Offset(0)), (P1, Offset(0))])
        assert [m.data for m in next(followed)] == [b"old"]

        def put_later() -> None:
            broker.add(b"new 0")
            broker.add(b"new 1", partition=1)

        threading.Timer(0.01, put_later).start()
        later = itertools.chain.from_iterable(followed)
        got = {next(later).data, next(later).data}
        assert got == {b"new 0", b"new 1"}


def test_a_follower_does_not_hammer_a_broker_that_refuses_to_wait(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A broker with too many waiting gets answers at once; then we pause ourselves."""
    monkeypatch.setattr("metaq.client.browser.POLL_INTERVAL_S", 0.1)
    with MemoryBroker(OURS) as broker, browse(broker) as browser:
        threading.Timer(0.02, broker.add, (b"new",)).start()
        assert [m.data for m in next(browser.follow([(P0, Offset(0))]))] == [b"new"]
        assert sum(isinstance(c, Get) for c in broker.commands) <= 2


def test_a_follower_notices_a_silent_broker() -> None:
    """A get that is never answered ends in an error within wait and time-out."""
    with MemoryBroker() as broker:
        broker.capabilities = JAVA
        broker.stay_silent = lambda command: isinstance(command, Get)
        cluster = Cluster({ID: broker.address})
        browser = TopicBrowser(cluster, timeout_s=0.05, clock=SystemClock())
        with browser, pytest.raises(RequestTimeoutError, match="t/7-0"):
            next(browser.follow([(P0, Offset(0))]))


def test_a_follower_survives_a_broken_connection(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It connects again and goes on at its offset: nothing is missing or doubled."""
    monkeypatch.setattr("metaq.client.browser.POLL_INTERVAL_S", 0.01)
    with MemoryBroker(JAVA) as broker, browse(broker) as browser:
        broker.add(b"first")
        gets: list[Get] = []

        def hang_up_once(command: object) -> bool:
            if isinstance(command, Get):
                gets.append(command)
                if len(gets) == 3:
                    broker.add(b"second")
                    return True
            return False

        broker.hang_up = hang_up_once
        followed = browser.follow([(P0, Offset(0)), (P1, Offset(0))])
        assert [m.data for m in next(followed)] == [b"first"]
        assert [m.data for m in next(followed)] == [b"second"]
        assert broker.connection_count == 2


def test_a_follower_ends_when_the_broker_stays_away(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Trying again has an end, and the error says who is not there."""
    monkeypatch.setattr("metaq.client.browser.POLL_INTERVAL_S", 0.01)
    monkeypatch.setattr("metaq.client.browser.RECONNECT_S", 0.05)
    with MemoryBroker(JAVA) as broker, browse(broker) as browser:

        def vanish(command: object) -> bool:
            if isinstance(command, Get):
                broker.stop_listening()
                return True
            return False

        broker.hang_up = vanish
        with pytest.raises(NoBrokerError, match="cannot connect"):
            next(browser.follow([(P0, Offset(0))]))


def test_a_broker_that_is_not_there_is_named() -> None:
    """A partition of an unknown broker cannot be read."""
    browser = TopicBrowser(Cluster({}), timeout_s=1, clock=SystemClock())
    with browser, pytest.raises(NoBrokerError, match="broker 7"):
        browser.range_of(P0)


def seek(broker: MemoryBroker, moment: int) -> int:
    with browse(broker) as browser:
        return offset_at(browser, P0, Millis(moment), timeout_s=5)


def test_every_time_finds_the_first_message_that_is_not_older() -> None:
    """Before, at, between and after all messages, over many segments."""
    with MemoryBroker() as broker:
        offsets = {}
        for n in range(60):
            offsets[NOW + 10 * n] = broker.add(b"x" * n, message_id=id_at(NOW + 10 * n))
            if n % 9 == 8:
                broker.roll()
        end = broker.end("t", 0)
        for moment, offset in offsets.items():
            assert seek(broker, moment) == offset
            assert seek(broker, moment - 1) == offset
        assert seek(broker, 0) == 0
        assert seek(broker, NOW + 600) == end


def test_an_empty_log_has_one_answer_to_every_time() -> None:
    """Nothing was put: reading starts where the first message will be."""
    with MemoryBroker() as broker:
        assert seek(broker, NOW) == 0
        broker.segments["t", 0][-1] += b""
        assert seek(broker, NOW) == 0


def test_ids_of_a_java_broker_carry_no_time() -> None:
    """A search by time says so instead of guessing."""
    assert id_time(MessageId(-5468930500527640576)) is None
    with MemoryBroker() as broker:
        broker.add(b"x", message_id=-5)
        with pytest.raises(NoWallTimeError, match="Java broker"):
            seek(broker, NOW)


def test_an_id_tells_when_it_was_stamped() -> None:
    """The milliseconds come back."""
    assert id_time(id_at(NOW, sequence=77)) == NOW
