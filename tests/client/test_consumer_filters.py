"""Consumers and browsers with `where`: messages delivered, commits, errors.

Our brokers send only matching messages, MetaQ 1.4 brokers send all: users see no
difference.
"""

import random
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from metaq.client import Client, Consumer, MemoryOffsets, OutgoingMessage
from metaq.client.errors import GroupInUseError
from metaq.errors import ConfigError, CorruptRecordError
from metaq.model import Message
from metaq.testing.embedded import embedded_broker
from tests.brokers import AnyBroker, StartBroker
from tests.client.test_fetcher_named_damage import flip
from tests.client.worlds import IDLE, QUICK, WORLDS, partition, payloads, take
from tests.rigs.flipping import FlippingProxy
from tests.rigs.inside import move_consumer, subscription_of, twin_of
from tests.rigs.waiting import wait_until
from tests.sampling import SEED

ONE_BROKER = {
    "test_damage_is_met_where_nothing_matches": "its files are damaged",
    "test_a_log_whose_start_moved_is_read_on_from_there": "its files are removed",
}
ZERO = partition()
WHERE = "tag IN ('paid', 'void') AND amount > 10"


@pytest.fixture
def broker(start_broker: StartBroker) -> AnyBroker:
    return start_broker({"test": 1, "two": 2})


@pytest.fixture(params=["sync", "async"])
def client(request: pytest.FixtureRequest, broker: AnyBroker) -> Iterator[Any]:
    with WORLDS[request.param](**broker.client_options, **QUICK) as one:
        yield one


def order(number: int) -> OutgoingMessage:
    """Return a message: every fifth one is paid, every tenth one for more than 10."""
    tag = "paid" if number % 5 == 0 else None
    amount = {"amount": b"25"} if number % 10 == 0 else {"amount": b"9"}
    return OutgoingMessage(b"%d" % number, headers=amount, tag=tag)


def send(client: Any, numbers: range, topic: str = "test") -> None:
    with client.producer(in_flight_batches_max=1) as producer:
        producer.send_many(topic, [order(number) for number in numbers])


def matches(numbers: range) -> list[bytes]:
    return [b"%d" % number for number in numbers if number % 10 == 0]


def wait_no_lag(consumer: Any) -> None:
    wait_until(lambda: all(each.bytes == 0 for each in consumer.lag().values()))


@pytest.mark.slow
def test_what_matches_comes_in_order_and_the_rest_is_committed_past(
    client: Any,
) -> None:
    """The next member of the group gets what came since."""
    store = MemoryOffsets()
    options = {"where": WHERE, "offsets": store, **IDLE}
    send(client, range(100))
    with client.consumer("g", ["test"], **options) as consumer:
        found = take(consumer, 10)
        assert payloads(found) == matches(range(100))
        assert consumer.receive(0.05) is None
        wait_no_lag(consumer)
        statistics = consumer.statistics()
        assert statistics.delivered_count == 10
        assert statistics.missing_bytes == 0
        assert consumer.health().problems == ()
    send(client, range(100, 120))
    with client.consumer("g", ["test"], **options) as consumer:
        assert payloads(take(consumer, 2)) == matches(range(100, 120))


@pytest.mark.slow
def test_a_partition_without_a_match_is_neither_behind_nor_stuck(
    client: Any,
) -> None:
    """Also while it is written to, and for longer than the watchdog waits."""
    options = {"where": "tag = 'none'", "watchdog_s": 1.0, **IDLE}
    with (
        client.consumer("g", ["test"], offsets=MemoryOffsets(), **options) as consumer,
        client.producer() as producer,
    ):
        for number in range(60):
            producer.send("test", b"%d" % number, tag="some")
            assert consumer.receive(0.02) is None
        wait_no_lag(consumer)
        health = consumer.health()
        assert (health.state.value, health.problems) == ("running", ())
        assert consumer.statistics().missing_bytes == 0
        assert consumer.statistics().delivered_count == 0


@pytest.mark.slow
def test_a_message_that_is_handled_long_holds_back_what_does_not_match(
    client: Any,
) -> None:
    """Its offset is committed before those of others that came and were passed over."""
    send(client, range(1))
    store = MemoryOffsets()
    options = {"where": WHERE, "offsets": store, "commit_interval_s": 0.02, **IDLE}
    with client.consumer("g", ["test"], **options) as consumer:
        (first,) = take(consumer, 1)
        send(client, range(1, 10))
        twin = twin_of(consumer) if isinstance(consumer, Consumer) else consumer.twin
        end = [*client.browse("test")][-1].next_offset
        wait_until(lambda: reached(twin) == end)
        assert handled(twin) == first.offset
        assert consumer.receive(0.05) is None
        wait_until(lambda: handled(twin) == end)


def reached(consumer: Any) -> int:
    return int(subscription_of(consumer).status_of(ZERO).reached)


def handled(consumer: Any) -> int:
    return int(consumer.fetch_buffer.handled()[ZERO].offset)


@pytest.mark.slow
def test_a_filter_of_ones_own_sees_what_matches(client: Any) -> None:
    """And its refusals count as handled, too."""
    send(client, range(100))
    seen = list[Message]()

    def is_late(message: Message) -> bool:
        seen.append(message)
        return int(message.data) >= 50

    with client.consumer(
        "g", ["test"], where=WHERE, message_filter=is_late, **IDLE
    ) as consumer:
        assert payloads(take(consumer, 5)) == matches(range(50, 100))
        assert payloads(seen) == matches(range(100))
        assert consumer.statistics().filtered_count >= 5


@pytest.mark.slow
def test_lists_and_batches_have_matches_alone(client: Any) -> None:
    """A batch of one partition after the other is committed past the rest."""
    for topic in ("test", "two"):
        send(client, range(60), topic)
    store = MemoryOffsets()
    manual = {"where": WHERE, "offsets": store, "commit_interval_s": None, **IDLE}
    with client.consumer("g", ["test"], **manual) as consumer:
        many = consumer.receive_many(6, 10, fill=True)
        assert payloads(many) == matches(range(60))
    with client.consumer("g", ["two"], **manual) as consumer:
        for batch in consumer.batches(max_count=6, max_wait_s=30):
            assert sorted(payloads(batch), key=int) == matches(range(60))
            batch.commit()
            break
    with client.consumer("g", ["two"], **manual) as consumer:
        assert consumer.receive(0.05) is None


@pytest.mark.slow
def test_messages_larger_than_a_get_come_or_are_passed_over(client: Any) -> None:
    """Those that are put together from several gets, between others."""
    options: dict[str, Any] = {"where": "tag = 'a'", "fetch_bytes": 65536, **IDLE}
    sizes = (1, 300_000, 10, 200_000, 70_000, 1)
    with client.producer() as producer:
        for size in sizes:
            for tag in ("a", "b"):
                producer.send("test", bytes(size), tag=tag)
    with client.consumer("g", ["test"], **options) as consumer:
        found = take(consumer, len(sizes))
    assert [len(one.data) for one in found] == list(sizes)
    assert {one.tag for one in found} == {"a"}


@pytest.mark.slow
def test_a_seek_goes_on_with_the_next_match(client: Any) -> None:
    """To the start, or to a message that does not match."""
    send(client, range(30))
    fifteenth = [*client.browse("test")][15]
    with client.consumer("g", ["test"], where=WHERE, **IDLE) as consumer:
        assert payloads(take(consumer, 3)) == matches(range(30))
        consumer.seek(ZERO, fifteenth.offset)
        assert payloads(take(consumer, 1)) == [b"20"]
        consumer.seek(ZERO, "earliest")
        assert payloads(take(consumer, 3)) == matches(range(30))


@pytest.mark.slow
def test_browse_yields_what_matches(client: Any) -> None:
    """Up to the end, from one partition or all, and for ever."""
    send(client, range(50))
    send(client, range(50), "two")
    assert payloads(client.browse("test", where=WHERE)) == matches(range(50))
    both = payloads(client.browse("two", where=WHERE))
    assert sorted(both, key=int) == matches(range(50))
    assert [*client.browse("test", where="tag = 'none'")] == []
    following = client.browse("test", where=WHERE, stop_at_end=False)
    assert [next(following).data for _ in range(5)] == matches(range(50))
    send(client, range(50, 61))
    assert [next(following).data for _ in range(2)] == [b"50", b"60"]
    following.close()


@pytest.mark.slow
@pytest.mark.parametrize("count", [0, 1, 3, 5, 9])
def test_the_newest_are_the_newest_that_match(client: Any, count: int) -> None:
    """However far back they lie; all of them, where there are no more."""
    send(client, range(50))
    wanted = matches(range(50))[-count:] if count else []
    assert payloads(client.browse("test", last=count, where=WHERE)) == wanted
    if count:
        following = client.browse("test", last=count, where=WHERE, stop_at_end=False)
        assert [next(following).data for _ in wanted] == wanted
        send(client, range(50, 51))
        assert next(following).data == b"50"
        following.close()


@pytest.mark.slow
def test_the_newest_that_match_are_of_all_partitions(
    client: Any, broker: AnyBroker
) -> None:
    """By their times; ids of MetaQ 1.4 tell none, and one broker has an order."""
    with client.producer(in_flight_batches_max=1) as producer:
        for number in range(40):
            tag = "paid" if number % 4 == 0 else None
            place = f"0-{number % 8 // 4}"
            producer.send("two", b"%d" % number, tag=tag, partition=place)
    newest = client.browse("two", last=3, where="tag = 'paid'")
    assert payloads(newest) == [b"28", b"32", b"36"]


@pytest.mark.slow
def test_a_broker_of_ours_sends_what_matches_alone(
    broker: AnyBroker, client: Any
) -> None:
    """Another one sends all."""
    with client.producer() as producer:
        for number in range(100):
            producer.send("test", bytes(500), tag="a" if number % 50 == 0 else "b")
    options = {"where": "tag = 'a'", **IDLE}
    with client.consumer("g", ["test"], **options) as consumer:
        assert len(take(consumer, 2)) == 2
        assert consumer.receive(0.05) is None
        wait_no_lag(consumer)
        statistics = consumer.statistics()
    received = statistics.fetches[ZERO].received_bytes
    if broker.has_extensions:
        assert received < 100 * 500 / 40
        assert statistics.filtered_count == 0
    else:
        assert received > 100 * 500
        assert statistics.filtered_count == 98


@pytest.mark.slow
def test_a_match_that_is_damaged_on_the_way_costs_two_gets(
    broker: AnyBroker, client: Any
) -> None:
    """It is got as it is, and its end is not passed over."""
    with client.producer(in_flight_batches_max=1) as producer:
        for number in range(30):
            data = b"payload %03d" % number
            producer.send("test", data, tag="a" if number % 10 == 5 else None)
    with (
        FlippingProxy(broker.port, b"payload 015", left=1) as proxy,
        Client(brokers=[str(proxy.address)], **QUICK) as flipped,
        flipped.consumer("g", ["test"], where="tag = 'a'", **IDLE) as consumer,
    ):
        found = take(consumer, 3)
        assert payloads(found) == [b"payload 005", b"payload 015", b"payload 025"]
        assert proxy.flip_count == 1
        assert consumer.statistics().missing_bytes == 0
        if broker.has_extensions:
            assert consumer.statistics().fetches[ZERO].again_count == 1


def test_damage_is_met_where_nothing_matches(tmp_path: Path) -> None:
    """It stops a reader, or is skipped and counted, as without a filter."""
    options: dict[str, Any] = {"where": "tag = 'a'", **IDLE}
    settings = {"maxSegmentSize": "1000"}
    with embedded_broker(
        topics={"test": 1}, data_path=tmp_path, settings=settings
    ) as broker:
        with Client(brokers=[broker.address]) as client, client.producer() as producer:
            sent = [
                producer.send("test", bytes(50), tag="a" if number % 10 == 0 else "b")
                for number in range(60)
            ]
        broker.stop()
        path = sorted(tmp_path.glob("test-0/*.meta"))[-2]
        base = int(path.stem)
        at = next(n for n, one in enumerate(sent) if one.offset > base and n % 10 == 4)
        flip(path, sent[at].offset - base + 40)
        broker.start()
        before = sum(number % 10 == 0 for number in range(at))
        with Client(brokers=[broker.address], **QUICK) as client:
            with client.consumer("g", ["test"], **options) as consumer:
                assert len(take(consumer, before)) == before
                with pytest.raises(CorruptRecordError) as caught:
                    consumer.receive(30)
                assert caught.value.offset == sent[at].offset
            options["on_corrupt"] = "skip"
            with client.consumer("g", ["test"], **options) as consumer:
                assert len(take(consumer, 6)) == 6
                lost = sent[at + 1].offset - sent[at].offset
                assert consumer.statistics().missing_bytes == lost


def test_a_log_whose_start_moved_is_read_on_from_there(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The bytes that retention took are counted, and an error as at a start."""
    settings = {"maxSegmentSize": "1000"}
    with embedded_broker(
        topics={"test": 1}, data_path=tmp_path, settings=settings
    ) as broker:
        with Client(brokers=[broker.address], **QUICK) as client:
            for number in range(0, 100, 10):
                send(client, range(number, number + 10))
        broker.stop()
        first, *rest = sorted(tmp_path.glob("test-0/*.meta"))
        for file in first.parent.glob(f"{first.stem}.*"):
            file.unlink()
        (tmp_path / "holdings").unlink()
        broker.start()
        with Client(brokers=[broker.address], **QUICK) as client:
            left = [one for one in client.browse("test") if one.tag == "paid"]
            wanted = [one.data for one in left if one.headers["amount"] == b"25"]
            assert 1 < len(wanted) < 10
            with client.consumer("g", ["test"], where=WHERE, **IDLE) as consumer:
                assert payloads(take(consumer, len(wanted))) == wanted
                move_consumer(consumer, ZERO, 0)
                assert payloads(take(consumer, len(wanted))) == wanted
                lost = int(rest[0].stem)
                assert consumer.statistics().missing_bytes == lost
    (error,) = (each for each in caplog.records if each.levelname == "ERROR")
    assert f"old=0 new={lost}: the bytes between were deleted unread" in error.message


@pytest.mark.slow
def test_members_share_what_matches(client: Any) -> None:
    """And those that stay get all of it."""
    send(client, range(50), "two")
    options: dict[str, Any] = {"where": WHERE, "watchdog_s": 5.0, **IDLE}
    with client.consumer("g", ["two"], **options) as one:
        found = payloads(take(one, 5))
        assert one.receive(0.05) is None
        with client.consumer("g", ["two"], **options) as two:
            wait_until(lambda: len(one.assignment()) == len(two.assignment()) == 1)
            for number in (60, 70):
                place = next(iter(two.assignment())).name
                with client.producer() as producer:
                    sent = order(number)
                    producer.send(
                        "two",
                        sent.data,
                        tag=sent.tag,
                        headers=sent.headers,
                        partition=place,
                    )
            found += payloads(take(two, 2))
        send(client, range(80, 91), "two")
        found += payloads(take(one, 2))
        assert one.receive(0.05) is None
        wait_no_lag(one)
    wanted = [*matches(range(50)), b"60", b"70", b"80", b"90"]
    assert sorted(found, key=int) == wanted


def test_a_list_has_one_tag_or_each_its_own(client: Any) -> None:
    """Also within a transaction; twice is refused."""
    both = [b"plain", OutgoingMessage(b"more", headers={"amount": b"25"})]
    with client.producer(in_flight_batches_max=1) as producer:
        producer.send_many("test", both, tag="paid")
        with producer.transaction() as tx:
            tx.send_many("test", both, tag="void")
        with pytest.raises(ConfigError, match="expected it once"):
            producer.send_many("test", [OutgoingMessage(b"", tag="a")], tag="b")
    found = list(client.browse("test", where="tag IS NOT NULL"))
    assert [(each.data, each.tag) for each in found] == [
        (data, tag) for tag in ("paid", "void") for data in (b"plain", b"more")
    ]
    (last,) = client.browse("test", where="tag = 'void' AND amount > 10")
    assert last.data == b"more"


@pytest.mark.slow
def test_members_have_one_filter(client: Any) -> None:
    """Another member is refused with both; the first one reads on."""
    send(client, range(10))
    with client.consumer("g", ["test"], where=WHERE, **IDLE) as consumer:
        text = 'reads with where="tag IN .*, and this member with where="tag = \'x\'"'
        with pytest.raises(GroupInUseError, match=text):
            client.consumer("g", ["test"], where="tag = 'x'", **IDLE).__enter__()
        with pytest.raises(GroupInUseError, match="this member with no filter"):
            client.consumer("g", ["test"], **IDLE).__enter__()
        assert take(consumer, 1)[0].data == b"0"
    with client.consumer("g", ["test"], **IDLE) as consumer:
        send(client, range(11, 12))
        assert take(consumer, 1)[0].data == b"11"


@pytest.mark.slow
@pytest.mark.parametrize("walk", range(4))
def test_members_that_come_and_go_get_every_match_and_nothing_else(
    start_broker: StartBroker, walk: int
) -> None:
    """While messages of all sizes come, and their broker is restarted."""
    rng = random.Random(f"{SEED} {walk}")
    broker = start_broker({"two": 2})
    sent, got = set[bytes](), list[Message]()
    options: dict[str, Any] = {"where": "tag = 'a'", "fetch_bytes": 65536, **IDLE}
    with Client(**broker.client_options, **QUICK) as client, ExitStack() as stack:
        producer = stack.enter_context(client.producer())
        members = list[Any]()
        for step in range(60):
            act = rng.choice(["send", "send", "read", "read", "join", "leave", "stop"])
            if act == "send":
                for number in range(rng.randrange(30)):
                    data = b"%d-%d " % (step, number) * rng.choice([1, 9, 30_000])
                    tag = rng.choice(["a", "b", None])
                    producer.send("two", data, tag=tag)
                    sent |= {data} if tag == "a" else set()
            elif act == "join" and len(members) < 3:
                members.append(client.consumer("g", ["two"], **options))
                members[-1].start()
            elif act == "leave" and members:
                members.pop(rng.randrange(len(members))).close()
            elif act == "stop" and rng.random() < 0.3:
                broker.restart()
            for member in members:
                got += member.receive_many(rng.randrange(1, 50), 0.01)
        for member in members:
            member.receive_many(1, 0.01)
            member.close()
        with client.consumer("g", ["two"], **options) as last:
            wait_until(lambda: rest(last, got) >= sent)
            wait_no_lag(last)
    assert {one.data for one in got} == sent
    assert {one.tag for one in got} == {"a"}


def rest(consumer: Any, got: list[Message]) -> set[bytes]:
    """Take what is there; return all that came so far."""
    while many := consumer.receive_many(100, 0.05):
        got += many
    return {one.data for one in got}
