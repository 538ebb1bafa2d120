"""Named batches: recognised in another run, retried, counted; refusals that stop."""

import threading
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from metaq.client import Client
from metaq.client.errors import GivenUpError
from metaq.client.options import IN_FLIGHT_BATCHES_MAX
from metaq.client.produce.attempts import plan_spans
from metaq.client.produce.batches import ends_of
from metaq.errors import (
    ClosedError,
    ConnectionLostError,
    ForbiddenError,
    NoBrokerError,
    RequestTimeoutError,
    SequenceUsedError,
)
from metaq.model import BrokerId, TopicPartition
from metaq.protocol.commands import Mput, Put, Result, Version
from metaq.protocol.texts import SEQUENCE_USED, with_code
from metaq.protocol.version import Capabilities
from metaq.record.flags import encode_payload
from metaq.record.layout import HEADER_BYTES
from metaq.spark.sink.outbox import RETRIES_MAX, NamedSender
from tests.brokers import AnyBroker, StartBroker
from tests.client.memory_broker import JAVA, OURS, MemoryBroker

ONE_BROKER = {"MemoryBroker": "batches are lost, refused and not answered on cue"}

PARTITION = TopicPartition("test", BrokerId(0), 0)
ID = BrokerId(7)
P0, P1 = TopicPartition("t", ID, 0), TopicPartition("t", ID, 1)


# -- over brokers ---------------------------------------------------------------------


@pytest.fixture
def broker(start_broker: StartBroker) -> AnyBroker:
    return start_broker()


def sender_of(broker: AnyBroker) -> NamedSender:
    return NamedSender({BrokerId(0): broker.address}, timeout_s=20.0)


def run(broker: AnyBroker, batches: list[list[bytes]], spare: str) -> tuple[int, int]:
    """Send batches as one run of a task does; return what was sent and renamed."""
    sequence = 0
    with sender_of(broker) as sender:
        for number, payloads in enumerate(batches):
            sender.send(
                PARTITION,
                payloads,
                [0] * len(payloads),
                producer="task",
                sequence=sequence,
                spare=f"{spare}-{number}",
            )
            sequence += len(payloads)
        sender.flush()
        return sender.statistics().acknowledged_count, sender.renamed_count


@pytest.mark.slow
def test_another_run_stores_nothing_twice(broker: AnyBroker) -> None:
    """Batches of one message are named too; what is new is stored.

    MetaQ 1.4 knows no names: there, nothing is lost.
    """
    batches = [[b"a", b"b"], [b"c"], [b"d", b"e"]]
    run(broker, batches[:2], "first")
    done = run(broker, batches, "second")
    twice = [] if broker.has_extensions else [b"a", b"b", b"c"]
    broker.assert_stored([*twice, b"a", b"b", b"c", b"d", b"e"])
    assert done == (5, 0)


@pytest.mark.slow
def test_other_messages_under_the_same_numbers_are_never_lost(
    broker: AnyBroker,
) -> None:
    """They are sent under a name of their own, and counted; MetaQ 1.4 has no names."""
    run(broker, [[b"a", b"b"], [b"c", b"d"]], "first")
    done = run(broker, [[b"b", b"a"], [b"c", b"d"], [b"x", b"y", b"z"]], "second")
    wanted = b"abcdbaxyz" if broker.has_extensions else b"abcdbacdxyz"
    assert sorted(broker.stored()) == sorted(bytes([byte]) for byte in wanted)
    renamed_count = 2 if broker.has_extensions else 0
    assert done == (7, renamed_count)


@pytest.mark.slow
def test_each_message_keeps_its_own_flag(broker: AnyBroker) -> None:
    """Messages with and without attribute travel in one batch."""
    with_one, flag = encode_payload(b"data", "attribute")
    with sender_of(broker) as sender:
        sender.send(
            PARTITION,
            [with_one, b"bare"],
            [flag, 0],
            producer="p",
            sequence=0,
            spare="s",
        )
        sender.flush()
    with Client(brokers=[broker.address]) as client:
        found = {m.data: m.attribute for m in client.browse("test")}
    assert found == {b"data": "attribute", b"bare": None}


# -- brokers that misbehave -----------------------------------------------------------


def sender_to(broker: MemoryBroker, timeout_s: float = 5) -> NamedSender:
    return NamedSender({ID: str(broker.address)}, timeout_s=timeout_s)


def send(
    sender: NamedSender,
    payloads: Sequence[bytes],
    *,
    to: TopicPartition = P0,
    sequence: int = 0,
) -> None:
    flags = [0] * len(payloads)
    sender.send(to, payloads, flags, producer="p", sequence=sequence, spare="s")


def counts(sender: NamedSender) -> tuple[int, int, int, int]:
    done = sender.statistics()
    return (
        done.acknowledged_count,
        done.acknowledged_bytes,
        done.doubtful_count,
        sender.renamed_count,
    )


def send_batches(sender: NamedSender, batch_count: int, count: int) -> None:
    for number in range(batch_count):
        send(sender, [b"a"] * count, sequence=count * number)
    sender.flush()


def send_all(sender: NamedSender, count: int) -> None:
    send(sender, [b"a"] * count)
    sender.flush()


@given(
    sizes=st.lists(st.integers(min_value=0, max_value=200), min_size=1, max_size=60),
    bytes_max=st.integers(min_value=20, max_value=400),
    count_max=st.integers(min_value=1, max_value=10),
    has_mput=st.booleans(),
)
def test_spans_keep_order_and_limits(
    sizes: list[int], bytes_max: int, count_max: int, has_mput: bool
) -> None:
    """Joined, they are the payloads; each batch is within both limits."""
    payloads = [bytes(size) for size in sizes]
    capabilities = Capabilities(
        "v", has_mput=has_mput, batch_bytes_max=bytes_max, batch_records_max=count_max
    )
    spans = plan_spans(ends_of(payloads), 0, len(payloads), capabilities)
    pieces = [payloads[span.first : span.end] for span in spans]
    assert [p for piece in pieces for p in piece] == payloads
    for span, piece in zip(spans, pieces, strict=True):
        size = sum(HEADER_BYTES + len(p) for p in piece)
        is_within = has_mput and size <= bytes_max and len(piece) <= count_max
        assert span.is_mput == is_within
        assert is_within or len(piece) == 1 or not has_mput


@pytest.mark.slow
@pytest.mark.parametrize(
    ("capabilities", "command"), [(OURS, Mput), (JAVA, Put)], ids=["ours", "java"]
)
def test_messages_arrive_once_in_order(
    capabilities: Capabilities, command: type
) -> None:
    """Batches where they are announced, puts elsewhere: the log is the same."""
    with MemoryBroker(capabilities) as broker, sender_to(broker) as sender:
        wanted = [b"line %d" % n for n in range(2500)]
        send(sender, wanted[:1200])
        send(sender, [b"", b"other"], to=P1)
        send(sender, wanted[1200:], sequence=1200)
        sender.flush()
        assert broker.payloads("t", 0) == wanted
        assert broker.payloads("t", 1) == [b"", b"other"]
        assert counts(sender) == (2502, sum(map(len, wanted)) + 5, 0, 0)
        kinds = {type(c) for c in broker.commands if not isinstance(c, Version)}
        assert kinds == {command}


def test_a_batch_that_is_too_large_is_numbered_on() -> None:
    """Each piece carries the number of its first message."""
    with MemoryBroker() as broker, sender_to(broker) as sender:
        send(sender, [b"a"] * 150, sequence=7)
        sender.flush()
        batches = [c for c in broker.commands if isinstance(c, Mput)]
        assert [(b.producer, b.sequence) for b in batches] == [("p", 7), ("p", 107)]


def hang_up_at(number: int, seen: list[Mput]) -> Callable[[object], bool]:
    """Return a `hang_up` for one batch in the order they come; all go to `seen`."""

    def hang_up(command: object) -> bool:
        if not isinstance(command, Mput):
            return False
        seen.append(command)
        return len(seen) == number

    return hang_up


def test_a_broken_connection_is_mended_and_what_may_be_doubled_is_counted() -> None:
    """Everything in flight is sent again, in order, under the same sequence."""
    with MemoryBroker() as broker, sender_to(broker) as sender:
        batches: list[Mput] = []
        broker.hang_up = hang_up_at(2, batches)
        wanted = [b"%d" % n for n in range(300)]
        send(sender, wanted)
        sender.flush()
        stored = broker.payloads("t", 0)
        assert stored[-200:] == wanted[-200:]
        assert list(dict.fromkeys(stored)) == wanted
        assert broker.connection_count == 2
        done = sender.statistics()
        assert done.acknowledged_count == 300
        assert len(stored) - 300 <= done.doubtful_count <= 300
        assert done.doubtful_count >= 100
        assert batches[1].sequence in [b.sequence for b in batches[2:]]


def test_a_batch_that_the_broker_recognises_is_not_counted() -> None:
    """It was sent twice and is stored once."""
    with (
        MemoryBroker(replace(OURS, dedup=True)) as broker,
        sender_to(broker) as sender,
    ):
        seen: list[Mput] = []
        broker.hang_up = hang_up_at(1, seen)
        send_all(sender, 50)
        assert [(each.producer, each.sequence) for each in seen] == [("p", 0)] * 2
        assert sender.statistics().doubtful_count == 0


def test_a_connection_that_is_lost_between_batches_is_made_again() -> None:
    """Nothing was in flight that could have told; nothing may be there twice."""
    with MemoryBroker() as broker, sender_to(broker) as sender:
        send_all(sender, 10)
        is_lost = threading.Event()
        connection = sender._pool.ready(broker.address)
        assert connection is not None
        connection.on_closed(lambda _reason: is_lost.set())
        broker.drop_connections()
        assert is_lost.wait(30)
        send(sender, [b"b"] * 10, sequence=10)
        sender.flush()
        assert broker.payloads("t", 0) == [b"a"] * 10 + [b"b"] * 10
        assert sender.statistics().acknowledged_count == 20


@pytest.mark.slow
def test_no_more_batches_are_in_flight_than_a_broker_remembers() -> None:
    """Per partition; the sixth waits for an answer to the first."""
    with MemoryBroker() as broker, sender_to(broker, timeout_s=1.0) as sender:
        broker.stay_silent = lambda command: isinstance(command, Mput)
        with pytest.raises(RequestTimeoutError):
            send_batches(sender, 20, 10)
        sent = {c.sequence for c in broker.commands if isinstance(c, Mput)}
        assert sent == {10 * number for number in range(IN_FLIGHT_BATCHES_MAX)}


@pytest.mark.slow
def test_a_silent_broker_is_asked_again_and_then_given_up() -> None:
    """The rounds are bounded, and the error says that the outcome is unknown."""
    with MemoryBroker() as broker, sender_to(broker, timeout_s=1.0) as sender:
        broker.stay_silent = lambda command: isinstance(command, Mput)
        with pytest.raises(RequestTimeoutError, match="outcome unknown"):
            send_all(sender, 2)
        puts = [c for c in broker.commands if isinstance(c, Mput)]
        assert len(puts) == 1 + RETRIES_MAX
        assert sender.statistics().acknowledged_count == 0


@pytest.mark.slow
def test_all_tries_of_a_batch_are_bounded() -> None:
    """A silent broker is not asked again when the time is over."""
    with (
        MemoryBroker() as broker,
        NamedSender(
            {ID: str(broker.address)}, timeout_s=1.5, retry_timeout_s=1.5
        ) as sender,
    ):
        broker.stay_silent = lambda command: isinstance(command, Mput)
        with pytest.raises(RequestTimeoutError, match="outcome unknown"):
            send_all(sender, 2)
        assert len([c for c in broker.commands if isinstance(c, Mput)]) == 1


@pytest.mark.slow
def test_a_broker_that_stays_away_is_given_up() -> None:
    """The first cause and the last are both in the error."""
    with MemoryBroker() as broker, sender_to(broker, timeout_s=1.5) as sender:

        def vanish(command: object) -> bool:
            if isinstance(command, Mput):
                broker.stop_listening()
                return True
            return False

        broker.hang_up = vanish
        with pytest.raises(GivenUpError, match=r"is lost.*; then "):
            send_all(sender, 2)


@pytest.mark.slow
def test_a_broker_that_always_hangs_up_is_given_up() -> None:
    """Reconnecting without any acknowledgement in between comes to an end."""
    with MemoryBroker() as broker, sender_to(broker) as sender:
        broker.hang_up = lambda command: isinstance(command, Mput)
        with pytest.raises(ConnectionLostError):
            send_all(sender, 2)


def test_a_refusal_stops_at_once_and_is_not_repeated() -> None:
    """A closed partition is an error with the broker's text; nothing is retried."""
    with MemoryBroker() as broker, sender_to(broker) as sender:
        broker.refuse = lambda command: (
            Result(403, b"partition[7-0] has been closed", command.opaque)
            if isinstance(command, Mput)
            else None
        )
        for _ in range(2):
            with pytest.raises(ForbiddenError, match="has been closed"):
                send_all(sender, 2)
        assert len([c for c in broker.commands if isinstance(c, Mput)]) == 1
        assert broker.connection_count == 1
        assert sender.statistics().acknowledged_count == 0


def refuse_sequence(wanted: int) -> Callable[[object], Result | None]:
    """Return a `refuse` that says 403 to the batch with this sequence."""
    return lambda command: (
        Result(403, b"low on space", command.opaque)
        if isinstance(command, Mput) and command.sequence == wanted
        else None
    )


def test_what_is_in_flight_at_a_refusal_is_heard_out() -> None:
    """Batches around the refused one are counted as what they came to."""
    with MemoryBroker() as broker, sender_to(broker) as sender:
        broker.refuse = refuse_sequence(100)
        with pytest.raises(ForbiddenError, match="low on space"):
            send_all(sender, 450)
        stored = len(broker.payloads("t", 0))
        assert (sender.statistics().acknowledged_count, stored) == (350, 350)


def test_send_raises_a_refusal_when_the_rest_has_its_answers() -> None:
    """Another batch is not taken, and what was in flight is counted by then."""
    with MemoryBroker() as broker, sender_to(broker) as sender:
        broker.refuse = refuse_sequence(100)
        with pytest.raises(ForbiddenError, match="low on space"):
            send_batches(sender, 1000, 100)
        stored = len(broker.payloads("t", 0))
        assert sender.statistics().acknowledged_count == stored
        with pytest.raises(ForbiddenError, match="low on space"):
            send(sender, [b"a"])
        assert len(broker.payloads("t", 0)) == stored


def test_a_closed_sender_takes_nothing() -> None:
    """Neither silence nor a wait for an answer that cannot come."""
    with MemoryBroker() as broker:
        with sender_to(broker) as sender:
            send_all(sender, 2)
        with pytest.raises(ClosedError):
            send(sender, [b"late"])
        assert sender.statistics().acknowledged_count == 2


def test_batches_whose_numbers_are_used_go_under_their_spare_names() -> None:
    """Each once, in their order among themselves; used as well, it is an error."""
    with MemoryBroker() as broker, sender_to(broker) as sender:
        used, used_text = {"p"}, with_code("x", SEQUENCE_USED, {}).encode()
        broker.refuse = lambda command: (
            Result(500, used_text, command.opaque)
            if isinstance(command, Mput) and command.producer in used
            else None
        )
        wanted = [b"%d" % n for n in range(450)]
        send(sender, wanted)
        sender.flush()
        assert broker.payloads("t", 0) == wanted
        assert counts(sender) == (450, 1240, 0, 450)
        used.add("s")
        with pytest.raises(SequenceUsedError):
            send_all(sender, 1)
        assert broker.connection_count == 1


@pytest.mark.slow
def test_after_a_refusal_a_silent_broker_leaves_an_unknown_outcome() -> None:
    """Hearing out ends with the time of the last request."""
    with MemoryBroker() as broker, sender_to(broker, timeout_s=1.5) as sender:
        broker.refuse = refuse_sequence(0)
        broker.stay_silent = lambda command: (
            isinstance(command, Mput) and command.sequence == 200
        )
        with pytest.raises(ForbiddenError, match="low on space"):
            send_all(sender, 400)
        assert sender.statistics().acknowledged_count == 200
        assert broker.connection_count == 1


def test_after_a_refusal_a_broken_connection_is_left_alone() -> None:
    """Nothing is sent again: outcomes that the break hid are unknown."""
    with MemoryBroker() as broker, sender_to(broker) as sender:
        broker.refuse = refuse_sequence(0)
        broker.hang_up = lambda command: (
            isinstance(command, Mput) and command.sequence == 200
        )
        with pytest.raises(ForbiddenError, match="low on space"):
            send_all(sender, 400)
        assert sender.statistics().acknowledged_count == 100
        assert broker.connection_count == 1


def test_a_partition_of_an_unknown_broker_cannot_be_sent_to() -> None:
    """The broker is named."""
    with NamedSender({}, timeout_s=5) as sender:
        with pytest.raises(NoBrokerError, match="broker 7"):
            send(sender, [b"x"])
        assert sender.statistics().acknowledged_count == 0
