"""Forms of a commit, in both worlds: their effect, and the errors of wrong ones.

On our broker and on MetaQ 1.4's.
"""

import asyncio
import contextlib
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass
from typing import Any

import pytest

from metaq.client import (
    AsyncClient,
    ClosedError,
    ConfigError,
    CoordinationError,
    MemoryOffsets,
    Message,
    NoBrokerError,
    OwnershipLostError,
    RequestTimeoutError,
)
from metaq.errors import ClientError
from metaq.model import Offset, TopicPartition
from metaq.zk.paths import NodePaths
from tests.brokers import AnyBroker, StartBroker
from tests.client.test_subscription_state_manual_commit import (
    by_receive,
    expire,
    stored,
)
from tests.client.worlds import IDLE, QUICK, WORLDS, partition, take
from tests.rigs.inside import loop_thread_of
from tests.rigs.waiting import until, wait_until

ZERO, ONE = partition(0), partition(1)
MANUAL: dict[str, Any] = {"commit_interval_s": None, **IDLE}
SIX = [b"%d" % number for number in range(6)]
PATIENCE_S = 30.0
ENDS = (ClosedError, OwnershipLostError, CoordinationError, CancelledError)
"""Ends of a commit while its client closes; cancelled is the wait of `AsyncWorld`."""


@pytest.fixture
def broker(start_broker: StartBroker) -> AnyBroker:
    return start_broker({"test": 2})


@pytest.fixture(params=["sync", "async"])
def world(request: pytest.FixtureRequest) -> Any:
    return WORLDS[request.param]


@pytest.fixture
def client(world: Any, broker: AnyBroker) -> Iterator[Any]:
    with world(**broker.client_options, **QUICK) as one:
        yield one


@dataclass(frozen=True)
class Batch:
    """An object with the offsets of its messages, as a batch."""

    messages: list[Message]
    offsets: Mapping[TopicPartition, Offset]

    def __iter__(self) -> Iterator[Message]:
        return iter(self.messages)


def ends(messages: list[Message]) -> dict[TopicPartition, int]:
    return {one.partition: one.next_offset for one in messages}


def read_both(consumer: Any) -> list[Message]:
    """Read three messages of each partition; the last one is being handled."""
    found = [consumer.receive(PATIENCE_S) for _ in range(6)]
    return sorted(found, key=lambda one: (one.partition, one.offset))


def put_both(broker: AnyBroker) -> None:
    for number in range(2):
        broker.put(*SIX[:3], partition=number)


# -- forms ----------------------------------------------------------------------------


def test_a_message_is_committed_with_all_before_it(
    broker: AnyBroker, client: Any
) -> None:
    """Not with those after it that were handed out, or are handled."""
    broker.put(*SIX)
    with client.consumer("g", ["test"], **MANUAL) as consumer:
        messages = consumer.receive_many(6, PATIENCE_S)
        consumer.commit(messages[1])
        assert consumer.committed([ZERO]) == {ZERO: messages[1].next_offset}
        assert stored(broker, ZERO).startswith(b"%d-" % messages[1].id)
        consumer.commit(messages[0])  # committed already
        assert consumer.committed([ZERO]) == {ZERO: messages[1].next_offset}
        assert consumer.statistics().commit_count == 1
    with client.consumer("g", ["test"], **MANUAL) as consumer:
        assert by_receive(consumer, 4) == SIX[2:]


@pytest.mark.parametrize("form", ["list", "generator", "batch", "offsets", "texts"])
def test_messages_and_offsets_of_several_partitions_are_committed(
    broker: AnyBroker, client: Any, form: str
) -> None:
    """Up to the last message of each partition, in whichever order they come."""
    put_both(broker)
    with client.consumer("g", ["test"], **MANUAL) as consumer:
        messages = read_both(consumer)
        some = [messages[1], messages[0], messages[3]]
        wanted = ends([messages[1], messages[3]])
        forms: dict[str, Any] = {
            "list": some,
            "generator": (one for one in some),
            "batch": Batch(some, wanted),
            "offsets": wanted,
            "texts": {one.name: offset for one, offset in wanted.items()},
        }
        consumer.commit(forms[form])
        assert consumer.committed() == wanted
        assert consumer.committed(["0-1"]) == {ONE: wanted[ONE]}
        assert consumer.statistics().commit_count == 1


def test_an_offset_of_no_message_is_refused(broker: AnyBroker, client: Any) -> None:
    """As `seek` refuses it; those of other partitions are committed."""
    put_both(broker)
    with client.consumer("g", ["test"], **MANUAL) as consumer:
        first = read_both(consumer)[0]
        within = r"test/0-0: 3 is not a message boundary; nearest: 0, 21"
        with pytest.raises(ClientError, match=within):
            consumer.commit({ZERO: 3, ONE: first.next_offset})
        assert consumer.committed() == {ZERO: None, ONE: first.next_offset}
        with pytest.raises(ClientError, match="expected an offset from 0 to 63, got 9"):
            consumer.commit_nowait({ZERO: 99}).result(PATIENCE_S)
        consumer.commit({ZERO: first.next_offset})
        assert consumer.committed([ZERO]) == {ZERO: first.next_offset}


@pytest.mark.slow
def test_offsets_at_hand_are_committed_without_their_broker(
    broker: AnyBroker, client: Any
) -> None:
    """Of messages handed out last, and what is committed. Others cannot be checked."""
    broker.put(*SIX)
    with client.consumer("g", ["test"], **MANUAL) as consumer:
        messages = consumer.receive_many(6, PATIENCE_S)
        broker.stop()
        for offset in (messages[2].next_offset, messages[1].offset):
            consumer.commit({ZERO: offset})
            assert consumer.committed([ZERO]) == {ZERO: offset}
        with pytest.raises((NoBrokerError, RequestTimeoutError)):
            consumer.commit({ZERO: 3}, timeout=0.5)
        assert consumer.committed([ZERO]) == {ZERO: messages[1].offset}


def test_a_batch_is_committed_to_its_own_offsets(
    broker: AnyBroker, client: Any
) -> None:
    """They may be after its last message: what a filter held back is passed over."""
    broker.put(*SIX)
    with client.consumer("g", ["test"], **MANUAL) as consumer:
        messages = consumer.receive_many(6, PATIENCE_S)
        batch = Batch(messages[:2], {ZERO: messages[3].next_offset})
        consumer.commit(batch)
        assert consumer.committed([ZERO]) == {ZERO: messages[3].next_offset}


def test_nothing_was_committed_is_none(broker: AnyBroker, client: Any) -> None:
    """Also of a partition that is not ours."""
    far = partition(0, "other")
    with client.consumer("g", ["test"], **MANUAL) as consumer:
        assert consumer.committed() == {ZERO: None, ONE: None}
        assert consumer.committed([far]) == {far: None}
        assert consumer.committed([]) == {}


def test_offsets_may_go_back_and_messages_do_not(
    broker: AnyBroker, client: Any
) -> None:
    """The next consumer gets a message that was set back, closed as it may be."""
    broker.put(*SIX)
    options = {"commit_interval_s": 3600.0, **IDLE}
    with client.consumer("g", ["test"], **options) as consumer:
        messages = take(consumer, 6)
        consumer.commit(messages[5])
        consumer.commit([messages[2]])
        assert consumer.committed([ZERO]) == {ZERO: messages[5].next_offset}
        consumer.commit()
        consumer.commit({ZERO: messages[2].next_offset})
        assert consumer.committed([ZERO]) == {ZERO: messages[2].next_offset}
    with client.consumer("g", ["test"], **options) as consumer:
        assert by_receive(consumer, 3) == SIX[3:]


def test_automatic_commits_do_not_set_back_what_is_ahead(
    broker: AnyBroker, client: Any
) -> None:
    """A message that is committed counts as handled."""
    broker.put(*SIX)
    options = {"commit_interval_s": 0.01, **IDLE}
    with client.consumer("g", ["test"], **options) as consumer:
        messages = consumer.receive_many(4, PATIENCE_S)
        consumer.commit(messages[2])
        assert consumer.receive(PATIENCE_S) is not None  # four are handled now
        four = {ZERO: messages[3].next_offset}
        wait_until(lambda: consumer.committed([ZERO]) == four)
        end = messages[3].next_offset // 4 * len(SIX)
        consumer.commit({ZERO: end})
        assert consumer.health().uncommitted_count == 0
        assert consumer.committed(["0-0"]) == {ZERO: end}
    assert stored(broker, ZERO).endswith(b"-%d" % end)


def test_a_seek_ends_what_was_named(broker: AnyBroker, client: Any) -> None:
    """From there on what is handled is committed."""
    broker.put(*SIX)
    options = {"commit_interval_s": 3600.0, **IDLE}
    with client.consumer("g", ["test"], **options) as consumer:
        messages = consumer.receive_many(6, PATIENCE_S)
        consumer.commit(messages[5])
        consumer.seek(ZERO, messages[1].offset)
        assert by_receive(consumer, 2) == SIX[1:3]
    with client.consumer("g", ["test"], **options) as consumer:
        assert by_receive(consumer, 3) == SIX[3:]


class LateOffsets(MemoryOffsets):
    """Writes a while after it is asked to."""

    async def commit(self, *args: Any, **more: Any) -> Any:
        await asyncio.sleep(0.05)
        return await super().commit(*args, **more)


@pytest.mark.slow
def test_a_rollback_goes_to_what_is_being_committed(
    broker: AnyBroker, client: Any
) -> None:
    """A commit that is under way is the last one."""
    broker.put(*SIX)
    options = {"commit_interval_s": None, "offsets": LateOffsets(), **IDLE}
    with client.consumer("g", ["test"], **options) as consumer:
        messages = consumer.receive_many(4, PATIENCE_S)
        consumer.commit()
        consumer.seek(ZERO, messages[1].offset)
        future = consumer.commit_nowait()
        consumer.rollback()
        assert future.result(PATIENCE_S) is None
        assert consumer.receive(PATIENCE_S).data == SIX[1]


def test_a_rollback_goes_to_what_was_named(broker: AnyBroker, client: Any) -> None:
    broker.put(*SIX)
    with client.consumer("g", ["test"], **MANUAL) as consumer:
        messages = consumer.receive_many(6, PATIENCE_S)
        consumer.commit(messages[2])
        consumer.rollback()
        assert by_receive(consumer, 3) == SIX[3:]


# -- refusals -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("what", "error", "words"),
    [
        (5, TypeError, "expected a Message, messages, a batch, or a mapping.* int 5"),
        (5.0, TypeError, r"got float 5\.0"),
        ("0-0", TypeError, "got str"),
        ([b"x"], TypeError, "got bytes"),
        ({1: 2}, TypeError, "partition: expected TopicPartition or str, got int 1"),
        ({"0": 2}, ConfigError, "expected a name as '0-3', got '0'"),
        ({"0-0": -1}, ConfigError, "offset: expected 0"),
        ({"0-0": "1"}, TypeError, "offset: expected a whole number"),
    ],
)
def test_what_is_nothing_to_commit_is_refused_by_type(
    broker: AnyBroker, client: Any, what: Any, error: type[Exception], words: str
) -> None:
    """At the call, in both forms, and nothing is handled or committed by it."""
    broker.put(*SIX)
    with client.consumer("g", ["test"], **MANUAL) as consumer:
        consumer.receive(PATIENCE_S)
        for commit in (consumer.commit, consumer.commit_nowait):
            with pytest.raises(error, match=words):
                commit(what)
        assert consumer.committed([ZERO]) == {ZERO: None}
        assert consumer.statistics().commit_count == 0
        with pytest.raises(TypeError, match="expected a list, got str"):
            consumer.committed("0-0")
        with pytest.raises(ConfigError, match="timeout"):
            consumer.commit(timeout=-1)


def test_a_text_names_no_partition_of_two_topics(
    broker: AnyBroker, client: Any
) -> None:
    with (
        client.consumer("g", ["test", "other"], **MANUAL) as consumer,
        pytest.raises(ConfigError, match="any of 2 topics"),
    ):
        consumer.commit({"0-0": 0})


def test_a_partition_of_another_member_is_refused_and_ours_is_committed(
    broker: AnyBroker, client: Any, world: Any
) -> None:
    """The error names it; the other offsets of the same commit are stored."""
    put_both(broker)
    with (
        client.consumer("g", ["test"], consumer_id="a", **MANUAL) as one,
        world(**broker.client_options, **QUICK) as other_client,
    ):
        messages = read_both(one)
        one.receive(0.01)
        with other_client.consumer("g", ["test"], consumer_id="b", **MANUAL) as two:
            wait_until(lambda: two.assignment() == {ONE})
            wait_until(lambda: one.assignment() == {ZERO})
            with pytest.raises(OwnershipLostError, match="test/0-1"):
                one.commit([messages[2], messages[5]])
            assert one.committed([ZERO, ONE]) == {
                ZERO: messages[2].next_offset,
                ONE: None,
            }
            two.commit({ONE: messages[3].next_offset})
            assert two.committed() == {ONE: messages[3].next_offset}


def test_a_lost_session_refuses_what_its_messages_name(
    broker: AnyBroker, client: Any
) -> None:
    """Until the partition is ours again; then it is the user's word."""
    broker.put(*SIX)
    with client.consumer("g", ["test"], **MANUAL) as consumer:
        messages = consumer.receive_many(6, PATIENCE_S)
        consumer.commit(messages[0])
        node = stored(broker, ZERO)
        broker.zookeeper.stop()
        with pytest.raises(CoordinationError):
            consumer.commit(messages[1], timeout=0.2)
        nowait = consumer.commit_nowait(messages[1])
        assert isinstance(nowait.exception(PATIENCE_S), CoordinationError)
        broker.zookeeper.start()
        assert stored(broker, ZERO) == node
        expire(broker, client)
        wait_until(lambda: consumer.statistics().rebalance_count >= 2)
        assert by_receive(consumer, 5) == SIX[1:]


# -- without waiting ------------------------------------------------------------------


@pytest.mark.slow
def test_commits_without_waiting_end_and_are_few(
    broker: AnyBroker, client: Any
) -> None:
    """One for each message, in order; the last one is stored in the end."""
    broker.put(*SIX * 20)
    with client.consumer("g", ["test"], **MANUAL) as consumer:
        futures = []
        for message in consumer:
            futures.append((consumer.commit_nowait(), message.next_offset))
            if len(futures) == 120:
                break
        for future, offset in futures:
            assert future.result(PATIENCE_S) is None
            assert consumer.committed([ZERO])[ZERO] >= offset
        assert consumer.committed([ZERO]) == {ZERO: futures[-1][1]}
        assert 1 <= consumer.statistics().commit_count <= 120


def test_a_commit_without_waiting_is_of_the_moment_of_its_call(
    broker: AnyBroker, client: Any
) -> None:
    """The message being handled when the loop comes to it is not committed by it."""
    broker.put(*SIX)
    with client.consumer("g", ["test"], **MANUAL) as consumer:
        iterator = iter(consumer)
        first = next(iterator)
        future = consumer.commit_nowait()
        second = next(iterator)
        assert future.result(PATIENCE_S) is None
        (offset,) = consumer.committed([ZERO]).values()
        assert offset == first.next_offset < second.next_offset


@pytest.mark.parametrize("interval_s", [None, 3600.0])
def test_a_close_after_it_takes_the_commit_along(
    broker: AnyBroker, client: Any, interval_s: float | None
) -> None:
    broker.put(*SIX)
    options = {"commit_interval_s": interval_s, **IDLE}
    consumer = client.consumer("g", ["test"], **options)
    consumer.start()
    messages = consumer.receive_many(3, PATIENCE_S)
    futures = [consumer.commit_nowait(), consumer.commit_nowait(messages[1])]
    consumer.close()
    for future in futures:
        assert future.result(PATIENCE_S) is None
    with client.consumer("g", ["test"], **options) as consumer:
        assert by_receive(consumer, 3) == SIX[3:]
    assert consumer.commit_nowait().result(PATIENCE_S) is None
    late = consumer.commit_nowait(messages[1])
    assert isinstance(late.exception(PATIENCE_S), OwnershipLostError)


@pytest.mark.slow
def test_the_end_of_the_client_ends_every_future(broker: AnyBroker, world: Any) -> None:
    """Threads that commit while it closes hear of it one way or the other."""
    broker.put(*SIX)
    futures: list[Future[None]] = []
    is_over = threading.Event()
    with world(**broker.client_options, **QUICK) as client:
        consumer = client.consumer("g", ["test"], **MANUAL)
        consumer.start()
        (message,) = consumer.receive_many(1, PATIENCE_S)

        def commit_on() -> None:
            with contextlib.suppress(ClosedError):
                while not is_over.is_set():
                    futures.append(consumer.commit_nowait(message))

        thread = threading.Thread(target=commit_on)
        thread.start()
        wait_until(lambda: len(futures) > 10)
        client.close()
        if world is WORLDS["async"]:
            is_over.set()
            thread.join(PATIENCE_S)
    is_over.set()
    thread.join(PATIENCE_S)
    assert not thread.is_alive()
    for future in futures:
        with contextlib.suppress(*ENDS):
            future.result(PATIENCE_S)


def test_the_end_of_the_loop_s_thread_ends_every_future(broker: AnyBroker) -> None:
    """It is killed under a commit that hangs."""

    is_hanging = threading.Event()

    class Hanging(MemoryOffsets):
        async def commit(self, *_words: Any, **_named: Any) -> Any:
            is_hanging.set()
            await asyncio.sleep(3600)

    broker.put(*SIX)
    client = WORLDS["sync"](**broker.client_options, **QUICK)
    client.start()
    consumer = client.consumer("g", ["test"], offsets=Hanging(), **MANUAL)
    consumer.start()
    (message,) = consumer.receive_many(1, PATIENCE_S)
    futures = [consumer.commit_nowait(message)]
    assert is_hanging.wait(PATIENCE_S)
    futures += [consumer.commit_nowait(message), consumer.commit_nowait()]
    loop_thread_of(client).stop()
    for future in futures:
        assert isinstance(future.exception(PATIENCE_S), ClosedError)
    with pytest.raises(ClosedError):
        consumer.commit_nowait()


# -- rebalances -----------------------------------------------------------------------


def test_a_commit_during_a_rebalance_is_stored_or_refused(broker: AnyBroker) -> None:
    """Whoever reads a partition next begins at the last commit that was not refused."""
    for number in range(2):
        broker.put(*SIX * 10, partition=number)

    async def scenario() -> None:
        done: dict[TopicPartition, int] = {}
        async with (
            AsyncClient(**broker.client_options, **QUICK) as one_client,
            AsyncClient(**broker.client_options, **QUICK) as two_client,
        ):
            one = one_client.consumer("g", ["test"], consumer_id="a", **MANUAL)
            await one.start()

            async def commit_each() -> None:
                async for message in one:
                    with contextlib.suppress(OwnershipLostError):
                        await one.commit(message)
                        done[message.partition] = message.next_offset

            reading = asyncio.ensure_future(commit_each())
            await until(lambda: len(done) == 2)
            two = two_client.consumer("g", ["test"], consumer_id="b", **MANUAL)
            await two.start()
            await until(lambda: two.assignment() == {ONE})
            found = await two.committed([ONE])
            assert found == {ONE: done[ONE]}
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)
            await two.close()
            await one.close()
        node = broker.zookeeper.nodes[NodePaths().group_offset("g", ONE)]
        assert node.data.endswith(b"-%d" % done[ONE])

    asyncio.run(scenario())
