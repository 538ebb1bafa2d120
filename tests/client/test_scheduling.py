"""Messages with a time: valid arguments, grouping, results."""

import datetime as dt
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from metaq.client import (
    Client,
    MessageTooLargeError,
    NoDelayError,
    OutgoingMessage,
    Scheduled,
    SendResult,
)
from metaq.client.produce.scheduling import AT_ONCE, DUE_STEP_MS, due_of, span_s
from metaq.errors import ConfigError, NoRoomError, ServerError
from metaq.model import BrokerId, MessageId, Millis, Offset, TopicPartition, id_time
from metaq.protocol.commands import Mput
from metaq.protocol.version import Capabilities
from metaq.testing.embedded import embedded_broker
from metaq.testing.fake_broker import FakeBroker
from tests.brokers import PYTHON, AnyBroker, StartBroker, broker_of
from tests.cases import for_each
from tests.client.producing import (
    OURS,
    TIMED,
    TIMED_ALIKE,
    Act,
    StandInBroker,
    at,
    producing,
)
from tests.client.worlds import IDLE, QUICK, WORLDS
from tests.rigs.virtual_time import run_virtually
from tests.rigs.waiting import wait_until

ONE_BROKER = {
    "test_a_full_log_of_delays_refuses_and_stores_nothing": (
        "a MetaQ 1.4 broker has no such log"
    ),
    "test_beside_a_broker_of_metaq_1_4_a_message_waits_or_fails": "it has both",
}
HOUR_MS = 3_600_000
NOW_MS = Millis(1_700_000_000_003)
CET = dt.timezone(dt.timedelta(hours=1))

# -- what users say -------------------------------------------------------------------

SPANS: list[tuple[object, float]] = [
    ("5s", 5),
    ("10m", 600),
    ("1h30m", 5400),
    ("1d12h", 129_600),
    ("500ms", 0.5),
    ("2.5s", 2.5),
    ("0s", 0),
    (30, 30),
    (0.25, 0.25),
    (dt.timedelta(minutes=2, microseconds=500_000), 120.5),
]


@for_each("value, seconds", SPANS)
def test_a_span_is_a_text_seconds_or_a_timedelta(value: object, seconds: float) -> None:
    """`test_validation_calls.py` has what is refused."""
    assert span_s("delay", value) == pytest.approx(seconds)


@given(
    st.integers(0, 2**41),
    st.floats(0, 10**8) | st.integers(0, 10**8) | st.timedeltas(dt.timedelta(0)),
)
def test_a_delay_is_never_cut_short(now_ms: int, delay: Any) -> None:
    """It is rounded up, by less than a step."""
    seconds = delay.total_seconds() if isinstance(delay, dt.timedelta) else delay
    if seconds > 10**9:
        return
    due_ms = due_of(Millis(now_ms), delay, None)
    assert due_ms is not None
    assert due_ms % DUE_STEP_MS == 0
    exact_ms = now_ms + math.ceil(seconds * 1000)
    assert exact_ms <= due_ms < exact_ms + DUE_STEP_MS


MOMENTS: list[tuple[dt.datetime, int]] = [
    (dt.datetime(1970, 1, 1, tzinfo=dt.UTC), 0),
    (dt.datetime(1970, 1, 1, 1, tzinfo=CET), 0),
    (dt.datetime(1969, 1, 1, tzinfo=dt.UTC), 0),
    (dt.datetime(1970, 1, 1, 0, 0, 1, 1, tzinfo=dt.UTC), 1001),
    (dt.datetime.max.replace(tzinfo=dt.UTC), 253_402_300_800_000),
]


@for_each("moment, due_ms", MOMENTS)
def test_a_moment_is_a_whole_millisecond_later_rather_than_earlier(
    moment: dt.datetime, due_ms: int
) -> None:
    """In any time zone; before 1970 is long ago."""
    assert due_of(NOW_MS, None, moment) == due_ms


def test_two_times_are_refused_and_none_is_none() -> None:
    """The text names both arguments."""
    assert due_of(NOW_MS, None, None) is None
    with pytest.raises(ConfigError, match="delay, deliver_at: expected one of them"):
        due_of(NOW_MS, 5, dt.datetime.now(dt.UTC))
    with pytest.raises(ConfigError, match=r"2030-01-01T00:00:00 without one"):
        due_of(NOW_MS, None, dt.datetime(2030, 1, 1))  # that is wrong


NUMBERS = st.integers(0, 2**63 - 1)


@given(
    st.builds(
        Scheduled,
        st.integers(-(2**63) + 1, 2**63 - 1).map(MessageId),
        st.builds(
            TopicPartition,
            st.sampled_from(["orders", "a/b-0", "t.é", "主题"]),
            st.integers(0, 1023).map(BrokerId),
            st.integers(0, 10**8),
        ),
        NUMBERS.map(Offset),
        st.integers(0, 10**14 - 1).map(Millis),
        st.integers(-1, 3),
    )
)
def test_a_receipt_is_a_text_and_back(receipt: Scheduled) -> None:
    """So an application may keep it, and cancel in another process."""
    again = Scheduled.parse(str(receipt))
    assert again == receipt
    assert (again.tier, again.due_ms) == (receipt.tier, receipt.due_ms)
    assert again.due.timestamp() * 1000 == pytest.approx(receipt.due_ms)
    assert again.topic == receipt.partition.topic
    assert str(receipt) in repr(receipt)


# -- grouping -------------------------------------------------------------------------

SENDS = st.lists(
    st.tuples(
        st.sampled_from([None, 100, 100, 200, 300, 10**10]),
        st.sampled_from(["now", "many", "wait"]),
        st.integers(0, 1),
    ),
    max_size=25,
)
ACTS = st.lists(
    st.sampled_from([Act.STORE, Act.CUT, Act.CUT_STORED, Act.BUSY]), max_size=6
)


@pytest.mark.slow
@settings(max_examples=100)
@given(SENDS, ACTS, st.sampled_from([TIMED, TIMED_ALIKE]))
def test_messages_with_a_time_share_batches_with_none_that_have_none(
    sends: list[tuple[int | None, str, int]], acts: list[Act], able: Capabilities
) -> None:
    """All are stored once, those of a partition and a time in their order.

    Each has a receipt of its own. A broker that takes one time gets batches with one.
    """

    async def main() -> None:
        broker = StandInBroker(capabilities=able)
        broker.acts.extend(acts)
        plain: dict[int, list[bytes]] = {0: [], 1: []}
        timed: dict[tuple[int, int], list[bytes]] = {}
        async with producing(broker, partitions=2, in_flight_batches_max=1) as world:
            futures, pairs = [], list[tuple[bytes, SendResult]]()
            for number, (due, how, partition) in enumerate(sends):
                times: dict[str, Any] = {}
                if due is not None:
                    moment = dt.datetime.fromtimestamp(due, dt.UTC)
                    times = {"deliver_at": moment}
                place = f"0-{partition}"
                data = [b"%d" % number]
                if how == "many":
                    data.append(b"%d+" % number)
                    results = await world.producer.send_many(
                        "test",
                        [OutgoingMessage(one, partition=place) for one in data],
                        **times,
                    )
                    pairs += zip(data, results, strict=True)
                else:
                    future = await world.producer.send_nowait(
                        "test", data[0], partition=place, **times
                    )
                    futures.append((data[0], future))
                    if how == "wait":
                        await future
                if due is None:
                    plain[partition] += data
                else:
                    timed.setdefault((due * 1000, partition), []).extend(data)
            pairs += [(one, await future) for one, future in futures]
        ids = [result.message_id for _, result in pairs]
        assert len(set(ids)) == len(ids)
        for one, result in pairs:
            if isinstance(result, Scheduled):
                due_ms, together = broker.places[result.offset]
                assert one in together
                assert result.due_ms == due_ms
        assert {n: broker.stored(n) for n in plain} == plain
        found: dict[tuple[int, int], list[bytes]] = {}
        for due_ms, partition, payloads in broker.scheduled:
            found.setdefault((due_ms, partition), []).extend(payloads)
        assert found == timed

    run_virtually(main())


def test_messages_of_one_batch_have_receipts_of_their_own() -> None:
    """One place, their ids one after the other; repetitions are recognised."""

    async def main() -> None:
        broker = StandInBroker(capabilities=TIMED)
        broker.acts.append(Act.CUT_STORED)
        async with producing(broker) as world:
            results = await world.producer.send_many("test", [b"a", b"b"], delay=60)
            first, second = results
            assert isinstance(first, Scheduled)
            assert isinstance(second, Scheduled)
            assert first.partition == at(0)
            assert (first.tier, first.offset) == (second.tier, second.offset) == (1, 0)
            assert second.message_id == first.message_id + 1
            assert first.due_ms == second.due_ms
        assert len(broker.scheduled) == 1
        names = {one.producer for one in broker.commands if isinstance(one, Mput)}
        assert len(names) == 1
        assert names != {world.producer.transacting.session_id}

    run_virtually(main())


def test_a_message_with_a_time_never_leaves_without_it() -> None:
    """Not as a put, though it is too large for a batch, nor to an older broker."""

    async def main() -> None:
        broker = StandInBroker(capabilities=TIMED)
        broker.capabilities = OURS
        async with producing(broker) as world:
            with pytest.raises(
                NoDelayError, match=r"replica of a set \(version 1\.0\)"
            ):
                await world.producer.send("test", b"x", delay=60)
        limits = {"payload_bytes_max": 1000, "batch_bytes_max": 500}
        small = type(OURS)(
            "1.0", has_mput=True, dedup=True, delay_ms_max=10**10, **limits
        )  # fmt: skip
        other = StandInBroker(capabilities=small)
        async with producing(other) as world:
            await world.producer.send("test", bytes(600))
            with pytest.raises(MessageTooLargeError):
                await world.producer.send("test", bytes(600), delay=60)
            await world.producer.send("test", bytes(400), delay=60)
        assert broker.commands == []
        assert [len(one.payload) for one in other.commands] == [600, 420]

    run_virtually(main())


@pytest.mark.parametrize(
    ("far", "count"), [(range(1000), 4), ([200, 201, 900], 4), (range(0, 512, 2), 257)]
)
def test_messages_that_are_too_far_cost_few_requests(
    far: Sequence[int], count: int
) -> None:
    """A broker names them, 256 at most: those fail, and each run between goes on."""

    async def main() -> None:
        broker = StandInBroker(capabilities=TIMED)
        broker.delay_ms_max = 10 * HOUR_MS  # with those that wait in one batch
        async with producing(broker) as world:
            futures = [
                await world.producer.send_nowait(
                    "test", b"%d" % n, delay=7200 + n + 40_000 * (n in far)
                )
                for n in range(1000)
            ]
            await world.producer.flush()
        errors = [each.exception() for each in futures]
        assert [n for n, error in enumerate(errors) if error] == list(far)
        stored = [data for _, _, datas in broker.scheduled for data in datas]
        expected = [b"%d" % n for n in range(1000) if n not in far]
        assert sorted(stored, key=int) == expected
        assert len(broker.commands) == count

    run_virtually(main())


def test_a_refusal_that_names_no_message_halves_its_batch() -> None:
    """Down to the one that it is for."""

    async def main() -> None:
        broker = StandInBroker(capabilities=TIMED)
        broker.acts += [Act.BROKEN, Act.BROKEN, Act.STORE, Act.BROKEN, Act.STORE]
        async with producing(broker) as world:
            futures = [
                await world.producer.send_nowait("test", b"x", delay=60 + n)
                for n in range(4)
            ]
            await world.producer.flush()
        kinds = [type(each.exception()) for each in futures]
        assert kinds == [ServerError] + 3 * [type(None)]
        mputs = [one for one in broker.commands if isinstance(one, Mput)]
        assert [one.count for one in mputs] == [4, 2, 2, 1, 1]

    run_virtually(main())


# -- against brokers ------------------------------------------------------------------


@pytest.fixture
def broker(start_broker: StartBroker) -> AnyBroker:
    return start_broker(topics={"test": 1, "other": 2})


@pytest.fixture(params=["sync", "async"])
def client(request: pytest.FixtureRequest, broker: AnyBroker) -> Iterator[Any]:
    with WORLDS[request.param](**broker.client_options, **QUICK) as one:
        yield one


def refuses(broker: AnyBroker, send: Any) -> bool:
    """Return whether this kind of broker takes no times, after a try."""
    if broker.has_extensions:
        return False
    text = r"broker 0 .*does not support scheduled messages: .* 1\.4, an"
    with pytest.raises(NoDelayError, match=text):
        send()
    assert broker.stored() == []
    return True


@pytest.mark.slow
def test_a_message_comes_at_its_time_and_not_before(
    client: Any, broker: AnyBroker
) -> None:
    """By a delay and by a moment; what consumers get is an ordinary message."""
    producer = client.producer()
    if refuses(broker, lambda: producer.send("test", b"x", delay="1s")):
        return
    # Not so soon that a busy machine has them late, or in another order.
    moment = dt.datetime.now(dt.UTC) + dt.timedelta(seconds=3)
    sent = producer.send("test", b"later", key="k", delay="3200ms")
    future = producer.send_nowait("test", b"sooner", deliver_at=moment)
    soon = future.result(20)
    assert isinstance(sent, Scheduled)
    assert isinstance(soon, Scheduled)
    assert soon.due - moment < dt.timedelta(milliseconds=1)
    with client.consumer("g", ["test"], **IDLE) as consumer:
        messages = [consumer.receive(20), consumer.receive(20)]
    assert [one.data for one in messages] == [b"sooner", b"later"]
    assert messages[1].key == b"k"
    for message, receipt in zip(messages, [soon, sent], strict=True):
        stamped_ms = id_time(message.id)
        assert stamped_ms is not None
        assert stamped_ms >= receipt.due_ms
        assert message.id != receipt.message_id
    assert producer.cancel(sent) is False


@pytest.mark.slow
def test_a_message_is_taken_back_before_its_time(
    client: Any, broker: AnyBroker
) -> None:
    """Alone out of its batch; by its text too, and asking twice is no mistake."""
    producer, many = client.producer(), [b"a", b"b", b"c"]
    if refuses(broker, lambda: producer.send_many("test", many, delay="1s")):
        return
    due = dt.datetime.now(dt.UTC) + dt.timedelta(seconds=4)
    a, b, c = producer.send_many("test", many, deliver_at=due)
    far = producer.send("test", b"far", delay="300d")
    assert len({(one.tier, one.offset) for one in (a, b, c)}) == 1
    assert producer.cancel(b) is True
    assert producer.cancel(str(b)) is True
    assert producer.cancel(far) is True
    strange = Scheduled(MessageId(5), far.partition, far.offset, far.due_ms, far.tier)
    assert producer.cancel(strange) is False
    wait_until(lambda: len(broker.stored()) == 2)
    assert broker.stored() == [b"a", b"c"]
    assert producer.cancel(a) is False


def test_a_time_that_has_passed_is_now(client: Any, broker: AnyBroker) -> None:
    """The receipt says where it is; there is nothing to take back."""
    producer, past = client.producer(), dt.datetime(2020, 1, 1, tzinfo=dt.UTC)
    if refuses(broker, lambda: producer.send("test", b"x", deliver_at=past)):
        return
    first, second = producer.send_many("test", [b"x", b"yz"], deliver_at=past)
    assert broker.stored() == [b"x", b"yz"]
    assert (first.tier, first.offset, second.offset) == (AT_ONCE, 0, 21)
    assert second.message_id == first.message_id + 1
    assert producer.cancel(second) is False


def test_a_time_too_far_is_refused_in_a_sentence(
    client: Any, broker: AnyBroker
) -> None:
    """Nothing is stored, and the next message goes on."""
    producer = client.producer()
    if refuses(broker, lambda: producer.send("test", b"x", delay="401d")):
        return
    with pytest.raises(ServerError, match="expected a time within 400d, got one in 40"):
        producer.send("test", b"x", delay="401d")
    assert isinstance(producer.send("test", b"y"), SendResult)
    assert client.admin().scheduled().message_count == 0
    assert broker.stored() == [b"y"]


@pytest.mark.slow
def test_messages_with_times_of_their_own_travel_together(
    client: Any, broker: AnyBroker
) -> None:
    """One that is too far takes no other along, and each can be taken back."""
    producer = client.producer(linger_s=0.2)
    if refuses(broker, lambda: producer.send("test", b"x", delay="1h")):
        return
    delays = ["40d", "2h", "401d", "2h", "2h", "50d", "400ms", "500ms"]
    futures = [
        producer.send_nowait("test", b"%d" % number, delay=delay)
        for number, delay in enumerate(delays)
    ]
    with pytest.raises(ServerError, match="expected a time within 400d, got one in 40"):
        futures[2].result(20)
    found = {n: each.result(20) for n, each in enumerate(futures) if n != 2}
    assert len({one.message_id for one in found.values()}) == len(found)
    admin = client.admin()
    for number in (0, 3, 5):
        assert producer.cancel(found[number]) is True
    wait_until(lambda: len(broker.stored()) == 2)
    assert broker.stored() == [b"6", b"7"]
    assert admin.scheduled("test").message_count == 2
    assert [producer.cancel(found[number]) for number in (1, 4, 6)] == [
        True,
        True,
        False,
    ]
    assert admin.scheduled("test").message_count == 0


@pytest.mark.slow
@pytest.mark.parametrize("world", ["sync", "async"])
def test_a_full_log_of_delays_refuses_and_stores_nothing(
    tmp_path: Path, world: str
) -> None:
    """Code `no-room`: messages without a time go on."""
    settings = {"delayBytesMax": "1000"}
    with broker_of(PYTHON, tmp_path, settings=settings) as broker:
        fill(broker, world)


def fill(broker: AnyBroker, world: str) -> None:
    with WORLDS[world](**broker.client_options, **QUICK) as client:
        producer = client.producer()
        producer.send("test", bytes(2000), delay="1h")
        with pytest.raises(NoRoomError, match="delayed messages take"):
            producer.send("test", b"x", delay="1h", timeout=1)
        producer.send("test", b"y")
        assert client.admin().scheduled().message_count == 1
    assert broker.stored() == [b"y"]


@pytest.mark.slow
def test_a_transaction_schedules_with_its_commit(
    client: Any, broker: AnyBroker
) -> None:
    """Nothing before, and nothing after a rollback."""
    producer = client.producer()

    def send() -> None:
        with producer.transaction() as tx:
            tx.send("test", b"x", delay="1h")

    if refuses(broker, send):
        return
    admin = client.admin()
    with producer.transaction() as tx:
        tx.send("test", b"now")
        tx.send("test", b"one", delay="1h")
        tx.send_many("test", [b"two", b"three"], delay="200ms")
        assert admin.scheduled().message_count == 0
    wait_until(lambda: len(broker.stored()) == 3)
    assert broker.stored() == [b"now", b"two", b"three"]
    assert admin.scheduled("test").message_count == 1
    tx = producer.transaction()
    tx.send("test", b"none", delay="1h")
    tx.rollback()
    assert admin.scheduled("test").message_count == 1


@pytest.mark.slow
def test_an_xa_transaction_schedules_with_its_commit(
    client: Any, broker: AnyBroker
) -> None:
    """As a local one; prepared, it waits for the verdict."""
    xa = client.xa("q")
    if not broker.has_extensions:
        xa.begin(xa.xid(1, "x"))
        with pytest.raises(NoDelayError):
            xa.send("test", b"x", delay="1h")
        xa.close()
        return
    admin = client.admin()
    xa.begin(xa.xid(1, "x"))
    xa.send("test", b"x", delay="1h")
    xa.prepare()
    assert admin.scheduled().message_count == 0
    xa.commit()
    wait_until(lambda: admin.scheduled().message_count == 1)
    xa.close()


def test_a_producer_that_may_spool_refuses_a_time(
    client: Any, broker: AnyBroker, tmp_path: Any
) -> None:
    """In one sentence that says where it belongs."""
    with (
        client.ordered_producer("test", "0:1", tmp_path) as producer,
        pytest.raises(TypeError, match="no option 'delay'; here that is an argument"),
    ):
        producer.send(b"x", delay="1h")
    assert broker.stored() == []


@pytest.mark.slow
def test_beside_a_broker_of_metaq_1_4_a_message_waits_or_fails() -> None:
    """It is never there at once: what that broker would get is refused, by itself."""
    with embedded_broker(topics={"test": 1}) as broker:
        coordinator = broker.zookeeper.coordinator
        with (
            FakeBroker({"test": 1}, broker_id=9, coordinator=coordinator) as legacy,
            Client(**broker.client_options) as client,
            client.producer() as producer,
        ):
            wait_until(lambda: len(client.partitions("test")) == 2)
            refused = 0
            for number in range(40):
                try:
                    sent = producer.send("test", b"%d" % number, delay="1h")
                except NoDelayError:
                    refused += 1
                else:
                    assert isinstance(sent, Scheduled)
            assert 0 < refused < 40
            assert client.admin().scheduled("test").message_count == 40 - refused
            assert legacy.payloads() == []
            kept = producer.send("test", b"x", delay="1h", partition="0-0")
            assert isinstance(kept, Scheduled)
