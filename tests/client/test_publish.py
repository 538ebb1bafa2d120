"""Publishing: batches, order, retries that are counted, refusals that stop."""

from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from metaq.client.discovery import Cluster
from metaq.client.errors import ConnectionLostError, GivenUpError
from metaq.client.publish import (
    BATCHES_IN_FLIGHT_MAX,
    TRIES_MAX,
    Publisher,
    encode_batch,
    split_batches,
)
from metaq.clock import SystemClock
from metaq.errors import ForbiddenError, NoBrokerError, RequestTimeoutError
from metaq.model import BrokerId, Position, TopicPartition
from metaq.protocol.commands import Mput, Put, Result, Version
from metaq.protocol.version import Capabilities
from metaq.record.layout import HEADER_BYTES
from metaq.record.scan import CleanEnd, scan_records
from tests.client.memory_broker import JAVA, OURS, MemoryBroker

ID = BrokerId(7)
P0, P1 = TopicPartition("t", ID, 0), TopicPartition("t", ID, 1)


def publish(broker: MemoryBroker, timeout_s: float = 5) -> Publisher:
    return Publisher(
        Cluster({ID: broker.address}),
        producer="p",
        timeout_s=timeout_s,
        clock=SystemClock(),
        sleep=lambda _seconds: None,
    )


@given(
    sizes=st.lists(st.integers(min_value=0, max_value=200), max_size=60),
    bytes_max=st.integers(min_value=20, max_value=400),
    count_max=st.integers(min_value=1, max_value=10),
)
def test_batches_keep_order_and_limits(
    sizes: list[int], bytes_max: int, count_max: int
) -> None:
    """Joined, the batches are the payloads; each is within both limits or single."""
    payloads = [bytes(size) for size in sizes]
    capabilities = Capabilities(
        "v", has_mput=True, batch_bytes_max=bytes_max, batch_records_max=count_max
    )
    batches = list(split_batches(payloads, capabilities))
    assert [p for batch in batches for p in batch] == payloads
    for batch in batches:
        size = sum(HEADER_BYTES + len(p) for p in batch)
        assert len(batch) == 1 or (size <= bytes_max and len(batch) <= count_max)


def test_a_batch_is_records_in_segment_format() -> None:
    """The body of an mput is what a segment holds, ids still 0."""
    result = scan_records(encode_batch([b"a", b"bc", b"d"], 0))
    assert result == CleanEnd(Position(64), 3, result.last_id)


@pytest.mark.parametrize(
    ("capabilities", "command"), [(OURS, Mput), (JAVA, Put)], ids=["ours", "java"]
)
def test_messages_arrive_once_in_order(
    capabilities: Capabilities, command: type
) -> None:
    """Batches where they are announced, puts elsewhere: the log is the same."""
    with MemoryBroker(capabilities) as broker:
        publisher = publish(broker)
        wanted = [b"line %d" % n for n in range(2500)]
        publisher.send(P0, wanted[:1200])
        publisher.send(P1, [b"", b"other"])
        publisher.send(P0, wanted[1200:])
        publisher.flush()
        publisher.close()
        assert broker.payloads("t", 0) == wanted
        assert broker.payloads("t", 1) == [b"", b"other"]
        statistics = publisher.statistics()
        assert statistics.message_count == 2502
        assert statistics.by_partition == {P0: 2500, P1: 2}
        assert statistics.doubtful_count == statistics.in_flight_count == 0
        assert statistics.size_bytes == sum(map(len, wanted)) + 5
        kinds = {type(c) for c in broker.commands if not isinstance(c, Version)}
        assert kinds == {command}


def test_sequences_go_on_per_partition() -> None:
    """Each batch carries the number of its first message in its partition."""
    with MemoryBroker() as broker:
        publisher = publish(broker)
        publisher.send(P0, [b"a"] * 150)
        publisher.send(P1, [b"a"] * 30)
        publisher.send(P0, [b"a"] * 20)
        publisher.flush()
        publisher.close()
        batches = [c for c in broker.commands if isinstance(c, Mput)]
        assert [(b.partition, b.sequence) for b in batches] == [
            (0, 0), (0, 100), (1, 0), (0, 150),
        ]  # fmt: skip
        assert {b.producer for b in batches} == {"p"}


def test_a_broken_connection_is_mended_and_what_may_be_doubled_is_counted() -> None:
    """Everything in flight is sent again, in order, under the same sequence."""
    with MemoryBroker() as broker:
        batches: list[Mput] = []

        def hang_up_once(command: object) -> bool:
            if not isinstance(command, Mput):
                return False
            batches.append(command)
            return len(batches) == 2

        broker.hang_up = hang_up_once
        publisher = publish(broker)
        wanted = [b"%d" % n for n in range(300)]
        publisher.send(P0, wanted)
        publisher.flush()
        publisher.close()
        assert broker.payloads("t", 0)[-200:] == wanted[-200:]
        assert broker.connection_count == 2
        statistics = publisher.statistics()
        assert statistics.message_count == 300
        assert 200 <= statistics.doubtful_count <= 300
        assert batches[1].sequence in [b.sequence for b in batches[2:]]


def test_a_batch_that_the_broker_recognises_is_not_doubtful() -> None:
    """It was sent twice and is stored once."""
    with MemoryBroker(replace(OURS, dedup=True)) as broker:
        seen: list[Mput] = []

        def hang_up_once(command: object) -> bool:
            if not isinstance(command, Mput):
                return False
            seen.append(command)
            return len(seen) == 1

        broker.hang_up = hang_up_once
        publisher = publish(broker)
        publisher.send(P0, [b"a"] * 50)
        publisher.flush()
        publisher.close()
        assert [(each.producer, each.sequence) for each in seen] == [("p", 0)] * 2
        assert publisher.statistics().doubtful_count == 0


def test_no_more_batches_are_in_flight_than_a_broker_remembers() -> None:
    """Per partition; the sixth waits for an answer to the first."""
    with MemoryBroker() as broker:
        most = 0
        publisher = publish(broker)

        def count(command: object) -> bool:
            nonlocal most
            if isinstance(command, Mput):
                most = max(most, publisher.statistics().in_flight_count)
            return False

        broker.hang_up = count
        for number in range(20):
            publisher.send(P0, [b"%d" % number] * 10)
        publisher.flush()
        publisher.close()
        assert len(broker.payloads("t", 0)) == 200
        assert most <= 10 * BATCHES_IN_FLIGHT_MAX


def test_a_silent_broker_is_asked_again_and_then_given_up() -> None:
    """The rounds are bounded, and the error says that the outcome is unknown."""
    with MemoryBroker() as broker:
        broker.stay_silent = lambda command: isinstance(command, Mput)
        publisher = publish(broker, timeout_s=0.03)
        publisher.send(P0, [b"a", b"b"])
        with pytest.raises(RequestTimeoutError, match="outcome unknown"):
            publisher.flush()
        publisher.close()
        assert broker.connection_count == 1 + TRIES_MAX
        assert publisher.statistics().in_flight_count == 2
        assert publisher.statistics().message_count == 0


def test_a_broker_that_stays_away_is_given_up() -> None:
    """The first cause and the last are both in the error."""
    with MemoryBroker() as broker:

        def vanish(command: object) -> bool:
            if isinstance(command, Mput):
                broker.stop_listening()
                return True
            return False

        broker.hang_up = vanish
        publisher = publish(broker, timeout_s=0.05)
        publisher.send(P0, [b"a", b"b"])
        with pytest.raises(GivenUpError, match=r"is lost.*then cannot connect"):
            publisher.flush()
        publisher.close()


def test_a_broker_that_always_hangs_up_is_given_up() -> None:
    """Reconnecting without any acknowledgement in between comes to an end."""
    with MemoryBroker() as broker:
        broker.hang_up = lambda command: isinstance(command, Mput)
        publisher = publish(broker)
        publisher.send(P0, [b"a", b"b"])
        with pytest.raises(ConnectionLostError):
            publisher.flush()
        publisher.close()


def test_more_than_a_connection_holds_is_sent_again_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What is sent once more waits for room on the new connection."""
    monkeypatch.setattr("metaq.client.wire.IN_FLIGHT_COUNT_MAX", 4)
    monkeypatch.setattr("metaq.client.publish.LANE_COUNT_MAX", 20)
    with MemoryBroker(JAVA) as broker:
        count = 0

        def hang_up_once(command: object) -> bool:
            nonlocal count
            count += isinstance(command, Put)
            return isinstance(command, Put) and count == 6

        broker.hang_up = hang_up_once
        publisher = publish(broker)
        wanted = [b"%d" % n for n in range(50)]
        publisher.send(P0, wanted)
        publisher.flush()
        publisher.close()
        stored = broker.payloads("t", 0)
        assert list(dict.fromkeys(stored)) == wanted
        doubled = len(stored) - len(wanted)
        assert doubled <= publisher.statistics().doubtful_count <= 8


def test_a_refusal_stops_at_once_and_is_not_repeated() -> None:
    """A closed partition is an error with the broker's text; nothing is retried."""
    with MemoryBroker() as broker:
        broker.refuse = lambda command: (
            Result(403, b"partition[7-0] has been closed", command.opaque)
            if isinstance(command, Mput)
            else None
        )
        publisher = publish(broker)
        publisher.send(P0, [b"a", b"b"])
        with pytest.raises(ForbiddenError, match="has been closed"):
            publisher.flush()
        publisher.close()
        assert broker.connection_count == 1
        assert publisher.statistics().message_count == 0
        assert publisher.statistics().refused_count == 2


def refuse_sequence(wanted: int) -> Callable[[object], Result | None]:
    """Return a `refuse` that says 403 to the batch with this sequence."""
    return lambda command: (
        Result(403, b"low on space", command.opaque)
        if isinstance(command, Mput) and command.sequence == wanted
        else None
    )


def send_all(publisher: Publisher, count: int) -> None:
    publisher.send(P0, [b"a"] * count)
    publisher.flush()


def test_what_is_in_flight_at_a_refusal_is_heard_out() -> None:
    """Batches around the refused one are counted as what they came to."""
    with MemoryBroker() as broker:
        broker.refuse = refuse_sequence(100)
        publisher = publish(broker)
        with pytest.raises(ForbiddenError, match="low on space"):
            send_all(publisher, 450)
        publisher.close()
        statistics = publisher.statistics()
        stored = len(broker.payloads("t", 0))
        assert (statistics.message_count, stored) == (350, 350)
        assert statistics.refused_count == 100
        assert statistics.in_flight_count == 0


def test_after_a_refusal_a_silent_broker_leaves_an_unknown_outcome() -> None:
    """Hearing out ends with the time of the last request."""
    with MemoryBroker() as broker:
        broker.refuse = refuse_sequence(0)
        broker.stay_silent = lambda command: (
            isinstance(command, Mput) and command.sequence == 200
        )
        publisher = publish(broker, timeout_s=0.1)
        with pytest.raises(ForbiddenError, match="low on space"):
            send_all(publisher, 400)
        publisher.close()
        statistics = publisher.statistics()
        assert statistics.message_count == 200
        assert statistics.refused_count == 100
        assert statistics.in_flight_count == 100
        assert broker.connection_count == 1


def test_after_a_refusal_a_broken_connection_is_left_alone() -> None:
    """Nothing is sent again: outcomes that the break hid are unknown."""
    with MemoryBroker() as broker:
        broker.refuse = refuse_sequence(0)
        broker.hang_up = lambda command: (
            isinstance(command, Mput) and command.sequence == 200
        )
        publisher = publish(broker)
        with pytest.raises(ForbiddenError, match="low on space"):
            send_all(publisher, 400)
        publisher.close()
        statistics = publisher.statistics()
        assert statistics.message_count == 100
        assert statistics.refused_count == 100
        assert statistics.in_flight_count == 200
        assert broker.connection_count == 1


def test_a_partition_of_an_unknown_broker_cannot_be_sent_to() -> None:
    """The broker is named."""
    with MemoryBroker() as broker:
        publisher = publish(broker)
        with pytest.raises(NoBrokerError, match="broker 8"):
            publisher.send(TopicPartition("t", BrokerId(8), 0), [b"x"])
        publisher.close()
