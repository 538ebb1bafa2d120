"""Expired messages are skipped instead of being handed out, and counted."""

import asyncio
import datetime as dt
import time
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from metaq.client.consume.current_batch import CurrentBatch, Filling
from metaq.client.consume.decode import decode_messages
from metaq.model import (
    ID_MS_SHIFT,
    ID_ZERO_MS,
    Message,
    MessageId,
    Offset,
    id_time,
)
from metaq.record.expiry import EXPIRES_IN
from metaq.record.flags import encode_payload
from metaq.record.layout import encode_record
from tests.brokers import AnyBroker, StartBroker
from tests.client.test_fetch_handler import Bench
from tests.client.worlds import IDLE, QUICK, WORLDS, partition
from tests.rigs.waiting import wait_until

ZERO = partition()


class Reader(Bench):
    """A handler, a buffer and the batch of a reader, on a clock of its own."""

    def __init__(self, **options: Any) -> None:
        super().__init__(room=100_000, **options)
        self.start_ms = self.clock.wall_ms()
        self.current = CurrentBatch(self.buffer)
        self.messages: list[Message] = []

    @property
    def end(self) -> Offset:
        return self.messages[-1].next_offset if self.messages else Offset(0)

    def fetch(self, spans_ms: list[int | None]) -> None:
        """Fetch messages that expire so long after the start; None: never."""
        message_id = MessageId((self.start_ms - ID_ZERO_MS) << ID_MS_SHIFT)
        data = b""
        for span_ms in spans_ms:
            headers = {} if span_ms is None else {EXPIRES_IN: b"%d" % span_ms}
            payload, flag = encode_payload(b"x", None, None, headers)
            data += encode_record(payload, id=message_id, flag=flag)
        found, _ending = decode_messages(data, ZERO, self.end)
        self.messages += found
        self.handler.on_messages(ZERO, found, len(data), self.end)

    def handled(self) -> Offset:
        return self.buffer.handled()[ZERO].offset

    def is_expired(self, message: Message) -> bool:
        span = dict(message.header_pairs).get(EXPIRES_IN)
        passed_ms = self.clock.wall_ms() - self.start_ms
        return span is not None and passed_ms >= int(span)


STEPS = st.lists(
    st.one_of(
        st.tuples(
            st.just("fetch"),
            st.lists(st.none() | st.integers(0, 6), min_size=1, max_size=6),
        ),
        st.tuples(st.just("loop"), st.integers(1, 8)),
        st.tuples(st.just("some"), st.integers(1, 4)),
        st.tuples(st.just("list"), st.integers(1, 6)),
        st.tuples(st.just("release"), st.none()),
        st.tuples(st.just("time"), st.integers(1, 3)),
    ),
    max_size=12,
)


@pytest.mark.slow
@settings(max_examples=300)
@given(STEPS)
def test_nothing_expired_is_handed_out_and_nothing_else_is_passed_over(
    steps: list[tuple[str, Any]],
) -> None:
    """In loops, single messages and lists; what is being handled is never committed."""
    reader = Reader()
    got: list[Message] = []
    released: set[Offset] = set()
    busy: list[Message] = []

    def take(many: list[Message]) -> None:
        assert not any(map(reader.is_expired, many))
        assert not {one.offset for one in got} & {one.offset for one in many} - released
        got.extend(many)
        busy[:] = many
        if busy:
            assert reader.handled() <= busy[0].offset

    def hold_next() -> None:
        if not reader.current.held:
            batch = reader.buffer.take_nowait()
            if batch is not None:
                reader.current.hold(batch)

    for word, value in steps:
        if word == "fetch":
            reader.fetch(value)
        elif word == "time":
            reader.clock.advance_s(value / 1000)
        elif word == "release":
            released.update(one.offset for one in busy)
            reader.current.release()
        elif word == "some":
            hold_next()
            take(reader.current.some(value))
        elif word == "list":
            filling = Filling(reader.current, count_max=value)
            filling.add_nowait()
            take(filling.messages)
        else:
            hold_next()
            for piece in reader.current.pieces():
                for message in piece:
                    take([message])
                    value -= 1
                    if not value:
                        break
                if not value:
                    break
        assert reader.handled() <= reader.end
    # At the end all that is left comes, or has expired, and everything is handled.
    reader.current.release()
    released.update(one.offset for one in reader.messages)
    for _ in range(100):
        hold_next()
        if not reader.current.held:
            break
        take(reader.current.some(100))
    assert reader.handled() == reader.end
    seen = {one.offset for one in got}
    missing = [one for one in reader.messages if one.offset not in seen]
    assert all(map(reader.is_expired, missing))
    assert reader.handler.expired_count >= len(missing)
    assert not reader.fatal


def test_what_was_passed_over_does_not_come_with_a_list_that_is_given_back() -> None:
    """Messages that cannot expire were added to it."""
    reader = Reader()
    reader.fetch([0])
    reader.fetch([None])
    filling = Filling(reader.current, count_max=1)
    filling.add_nowait()
    assert filling.messages == reader.messages[1:]
    reader.current.release()
    batch = reader.buffer.take_nowait()
    assert batch is not None
    assert batch.take(9) == reader.messages[1:]


def test_without_the_header_nothing_is_looked_at() -> None:
    """A batch of plain messages, and one with other headers, have no check."""
    reader = Reader()
    reader.fetch([None, None])
    batch = reader.buffer.take_nowait()
    assert batch is not None
    assert batch.is_fresh is None
    keyed, flag = encode_payload(b"x", None, "k", {"trace": b"1"})
    data = encode_record(keyed, id=MessageId(1), flag=flag)
    assert not decode_messages(data, ZERO, Offset(0))[0].may_expire


def test_they_are_delivered_where_the_option_says_so() -> None:
    """Nothing is counted then."""
    reader = Reader(on_expired="deliver")
    reader.fetch([0, None])
    batch = reader.buffer.take_nowait()
    assert batch is not None
    assert len(batch.take(9)) == 2
    assert reader.handler.expired_count == 0


# -- against brokers ------------------------------------------------------------------


@pytest.fixture
def broker(start_broker: StartBroker) -> AnyBroker:
    return start_broker(topics={"test": 1})


@pytest.fixture(params=["sync", "async"])
def client(request: pytest.FixtureRequest, broker: AnyBroker) -> Iterator[Any]:
    with WORLDS[request.param](**broker.client_options, **QUICK) as one:
        yield one


def send(client: Any) -> None:
    """Send messages of which every second one has expired."""
    with client.producer() as producer:
        late: dict[str, Any] = {"expires_in": 0.001}
        producer.send("test", b"late", headers={"a": b"1"}, **late)
        producer.send("test", b"a")
        producer.send_many("test", [b"late", b"late"], **late)
        producer.send_nowait("test", b"b", expires_in="1h").result(20)
        producer.send("test", b"late", key="k", **late)
    time.sleep(0.01)


READS = ["loop", "receive", "receive_many", "batches", "run"]


@pytest.mark.slow
@pytest.mark.parametrize("how", READS)
def test_a_consumer_passes_over_expired_messages_and_commits_past_them(
    client: Any, broker: AnyBroker, how: str
) -> None:
    """However it reads; those of a MetaQ 1.4 broker, whose ids tell no time, stay."""
    send(client)
    wanted = [b"a", b"b"]
    if not broker.has_extensions:
        wanted = [b"late", b"a", b"late", b"late", b"b", b"late"]
    found: list[bytes] = []
    with client.consumer("g", ["test"], **IDLE) as consumer:
        read(consumer, how, len(wanted), found)
        assert sorted(found) == sorted(wanted)
        assert consumer.receive(0.2) is None
        wait_until(lambda: not any(each.bytes for each in consumer.lag().values()))
        end = dict(consumer.statistics().fetches)
        assert list(end) == [ZERO]
        consumer.commit()
        (committed,) = consumer.committed().values()
        if broker.has_extensions:
            assert consumer.statistics().expired_count >= 4
        (lag,) = consumer.lag().values()
        assert lag.bytes == 0
        assert committed is not None
    with client.consumer("g", ["test"], **IDLE) as consumer:
        assert consumer.receive(0.2) is None


def read(consumer: Any, how: str, count: int, found: list[bytes]) -> None:
    """Read so many messages."""
    if how == "loop":
        for message in consumer:
            found.append(message.data)
            if len(found) == count:
                return
    elif how == "receive":
        found.extend(consumer.receive(20).data for _ in range(count))
    elif how == "receive_many":
        while len(found) < count:
            found.extend(one.data for one in consumer.receive_many(4, 20))
    elif how == "batches":
        for batch in consumer.batches(max_wait_s=0.1):
            found.extend(one.data for one in batch)
            if len(found) >= count:
                return
    else:

        async def handle(message: Message) -> None:
            await asyncio.sleep(0)
            found.append(message.data)

        def handle_sync(message: Message) -> None:
            found.append(message.data)

        is_async = hasattr(consumer, "twin")
        while len(found) < count:
            consumer.run(handle if is_async else handle_sync, timeout=0.2)


@pytest.mark.slow
def test_a_message_with_a_time_counts_from_its_delivery(
    client: Any, broker: AnyBroker
) -> None:
    """It waits for longer than it lives."""
    if not broker.has_extensions:
        return
    sent = client.producer().send("test", b"x", delay="300ms", expires_in="250ms")
    wait_until(lambda: len(broker.stored()) == 1)
    with client.consumer("g", ["test"], on_expired="deliver", **IDLE) as consumer:
        message = consumer.receive(20)
    stamped_ms = id_time(message.id)
    assert stamped_ms is not None
    assert dt.timedelta(milliseconds=stamped_ms - sent.due_ms) >= dt.timedelta(0)
    assert message.headers[EXPIRES_IN] == b"250"
