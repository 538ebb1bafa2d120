"""Commands of a branch: one `mput` per partition, if the broker supports it."""

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from metaq.client import TransactionRolledBackError
from metaq.client.produce.broker_starts import BrokerStarts
from metaq.client.produce.transaction_branch import (
    Branch,
    BranchParts,
    PendingResult,
    PlacedMessage,
)
from metaq.errors import (
    ClosedError,
    ForbiddenError,
    MetaqError,
    RemoteProtocolError,
    RequestTimeoutError,
)
from metaq.model import BrokerId, LocalTransactionId, MessageId, TopicPartition
from metaq.peer.connection import PutListener
from metaq.peer.options import ConnectionOptions
from metaq.peer.pool import ConnectionPool
from metaq.protocol.commands import Mput, Put, Reply, Result
from metaq.protocol.connection import Connection, Role, WireLimits
from metaq.protocol.version import Capabilities
from metaq.record.ids import id_after
from tests.brokers import StartBroker
from tests.client.worlds import QUICK, WORLDS
from tests.rigs.pair import drain
from tests.rigs.virtual_time import VirtualClock, run_virtually
from tests.rigs.waiting import wait_until

OURS = Capabilities(
    "1", has_mput=True, mput_tx=True, batch_bytes_max=1000, batch_records_max=4
)
OLDER = replace(OURS, mput_tx=False)
JAVA = Capabilities("1.4.6.3-SNAPSHOT")
TRANSACTION = LocalTransactionId("s", 1)
P0, P1 = (TopicPartition("t", BrokerId(0), number) for number in (0, 1))

Answer = Callable[[Put | Mput], Result]


class Broker:
    """A connection to a broker that answers when the loop goes on."""

    def __init__(self, capabilities: Capabilities) -> None:
        self.capabilities = capabilities
        self.passes: list[list[Put | Mput]] = []
        """Commands that were in flight together."""
        self.refusal = b""
        self.replies: list[tuple[int, bytes]] = []
        """Answers to the first commands of any kind."""
        self.is_closed = False
        self.is_silent = False
        self._opaque = 0
        self.next_id = MessageId(1 << 30)
        self._in_flight: list[tuple[Put | Mput, Callable[[Reply], None]]] = []

    def next_opaques(self, count: int) -> range:
        self._opaque += count
        return range(self._opaque - count, self._opaque)

    def submit(
        self,
        frame: bytes,
        _opaque: int,
        on_reply: Callable[[Reply | MetaqError], None],
        *,
        deadline_s: float,
    ) -> None:
        self._take(frame, on_reply)

    def submit_puts(
        self, frames: bytes, _opaques: range, run: PutListener, *, deadline_s: float
    ) -> None:
        self._take(frames, lambda reply: run.on_outcome((reply.opaque,), reply))

    def _take(self, frames: bytes, on_reply: Callable[[Reply], None]) -> None:
        if self.is_closed:
            raise ClosedError("the connection is closed")
        wire = Connection(Role.SERVER, WireLimits())
        wire.receive_data(frames)
        for event in drain(wire):
            assert isinstance(event, Put | Mput)
            assert event.transaction == TRANSACTION
            if not self._in_flight:
                self.passes.append([])
                asyncio.get_running_loop().call_soon(self._answer)
            self.passes[-1].append(event)
            self._in_flight.append((event, on_reply))

    def _answer(self) -> None:
        in_flight, self._in_flight = self._in_flight, []
        for command, on_reply in in_flight:
            body = b"%d %d -1" % (self.next_id, command.partition)
            count = command.count if isinstance(command, Mput) else 1
            self.next_id = id_after(self.next_id, count)
            status, text = (500, self.refusal) if self.refusal else (200, body)
            if self.replies:
                status, text = self.replies.pop(0)
            if not self.is_silent:
                on_reply(Result(status, text, command.opaque))

    def close_for(self, _error: RemoteProtocolError) -> None:
        self.is_closed = True


def put(broker: Any, *sends: Sequence[PlacedMessage]) -> list[list[PendingResult]]:
    clock = VirtualClock()
    parts: Any = SimpleNamespace(clock=clock)
    branch = Branch(parts, broker, BrokerId(0), TRANSACTION)

    async def main() -> list[list[PendingResult]]:
        deadline_s = clock.monotonic_s() + 1
        return [await branch.put(each, deadline_s=deadline_s) for each in sends]

    return run_virtually(main())


def at(partition: TopicPartition, *payloads: bytes) -> list[PlacedMessage]:
    return [PlacedMessage(partition, payload, 0) for payload in payloads]


def shapes(broker: Broker) -> list[list[tuple[int, int]]]:
    """Return partition and messages of each command; 0 messages: a put."""
    return [
        [(one.partition, one.count if isinstance(one, Mput) else 0) for one in each]
        for each in broker.passes
    ]


MIXED = [*at(P0, b"a", b"b"), *at(P1, b"c"), *at(P0, b"d")]


def test_an_announced_batch_is_one_command_for_each_partition() -> None:
    """A lone message stays a put; ids come back in the order of the messages."""
    broker = Broker(OURS)
    (results,) = put(broker, MIXED)
    assert shapes(broker) == [[(0, 3), (1, 0)]]
    first = results[0].message_id
    assert results == [
        PendingResult(first, P0),
        PendingResult(id_after(first, 1), P0),
        PendingResult(id_after(first, 3), P1),
        PendingResult(id_after(first, 2), P0),
    ]


def test_ids_of_a_batch_carry_as_the_broker_carries_them() -> None:
    broker = Broker(OURS)
    broker.next_id = first = MessageId((1 << 30) + 4094)
    (results,) = put(broker, at(P0, b"a", b"b", b"c", b"d"))
    assert [one.message_id for one in results] == [id_after(first, k) for k in range(4)]


def test_flags_travel_with_a_batch() -> None:
    broker = Broker(OURS)
    put(broker, [PlacedMessage(P0, b"a", 1), PlacedMessage(P0, b"b", 0)])
    ((batch,),) = broker.passes
    assert batch.payload[16:20] == b"\0\0\0\1"
    assert batch.payload[37:41] == b"\0\0\0\0"


@pytest.mark.parametrize(
    ("messages", "wanted"),
    [
        (at(P0, *[b"x"] * 9), [[(0, 4)], [(0, 4)], [(0, 0)]]),
        (at(P0, *[bytes(480)] * 3), [[(0, 2)], [(0, 0)]]),
        (at(P0, bytes(2000), b"x", b"y"), [[(0, 0)], [(0, 2)]]),
    ],
    ids=["count", "bytes", "larger than any batch"],
)
def test_batches_keep_within_what_was_announced(
    messages: list[PlacedMessage], wanted: list[list[tuple[int, int]]]
) -> None:
    broker = Broker(OURS)
    (results,) = put(broker, messages)
    assert shapes(broker) == wanted
    assert len(results) == len(messages)


@pytest.mark.parametrize("announced", [OLDER, JAVA], ids=["older", "java"])
def test_other_brokers_get_puts_the_first_one_alone(announced: Capabilities) -> None:
    """Alone in the whole transaction, not in each call."""
    broker = Broker(announced)
    first, second = put(broker, MIXED, at(P1, b"e", b"f"))
    assert shapes(broker) == [[(0, 0)], [(0, 0), (0, 0), (1, 0)], [(1, 0), (1, 0)]]
    assert [one.partition for one in first] == [P0, P0, P1, P0]
    assert [one.partition for one in second] == [P1, P1]


def test_a_batch_that_is_refused_fails_the_call() -> None:
    broker = Broker(OURS)
    broker.refusal = b"Local transaction 'TX:s:1' has not been started."
    with pytest.raises(TransactionRolledBackError, match="its time was over"):
        put(broker, MIXED)
    broker.is_closed = True
    with pytest.raises(ClosedError):
        put(broker, MIXED)


def test_a_malformed_reply_behind_a_refusal_closes_the_connection() -> None:
    """All replies are read, and the first error is raised."""
    broker = Broker(OURS)
    broker.replies = [(403, b"closed"), (200, b"nonsense")]
    with pytest.raises(ForbiddenError):
        put(broker, MIXED)
    assert broker.is_closed


@pytest.mark.parametrize("announced", [OURS, JAVA], ids=["ours", "java"])
def test_puts_of_which_no_outcome_is_told_are_unknown_at_the_deadline(
    announced: Capabilities,
) -> None:
    """A connection does not report a reply again that found no memory."""
    broker = Broker(announced)
    broker.is_silent = True
    with pytest.raises(RequestTimeoutError, match="broker 0: no answer before"):
        put(broker, MIXED)


def is_away(client: Any) -> bool:
    """Tell whether the client knows of no broker."""
    try:
        return not client.stats(timeout=0.1)
    except MetaqError:
        return False


@pytest.mark.slow
@pytest.mark.parametrize("is_xa", [False, True])
@pytest.mark.parametrize("world", WORLDS)
def test_a_first_message_waits_for_the_only_broker_while_it_restarts(
    world: str, start_broker: StartBroker, *, is_xa: bool
) -> None:
    """As outside of a transaction: the broker is not registered, and comes back."""
    broker = start_broker()
    options = broker.client_options
    sender: Any
    with (
        WORLDS[world](**options, **QUICK) as client,
        client.producer() as producer,
        client.xa(qualifier="billing-1") as xa,
        ThreadPoolExecutor(1) as threads,
    ):
        sender = xa if is_xa else producer.transaction()
        xa.begin(xa.xid(1, "the topic is known then"))
        xa.send("test", b"rolled back")
        xa.rollback()
        producer.send("test", b"before")
        broker.stop()
        wait_until(lambda: is_away(client))
        if is_xa:
            xa.begin(xa.xid(2, "global"))
        sending = threads.submit(sender.send, "test", b"in it", timeout=20)
        assert not wait([sending], timeout=0.2).done
        broker.start()
        sending.result()
        sender.commit()
    assert broker.stored() == [b"before", b"in it"]


def test_what_waits_for_the_broker_of_a_transaction_ends_with_the_client() -> None:
    """Not at its deadline: a broker that is away is not heard of any more."""

    async def scenario() -> None:
        clock, loop = VirtualClock(), asyncio.get_running_loop()
        pool = ConnectionPool(clock=clock, options=ConnectionOptions(), loop=loop)
        parts = BranchParts(
            address_of=lambda _broker: None,
            pool=pool,
            clock=clock,
            session_id="s",
            starts=BrokerStarts(clock),
        )
        deadline_s = clock.monotonic_s() + 60.0
        waiting = asyncio.ensure_future(
            parts.wait_connect(BrokerId(0), deadline_s=deadline_s)
        )
        await asyncio.sleep(1.0)
        assert not waiting.done()
        await pool.close(deadline_s=deadline_s)
        with pytest.raises(ClosedError):
            await asyncio.wait_for(waiting, 1.0)

    run_virtually(scenario())
