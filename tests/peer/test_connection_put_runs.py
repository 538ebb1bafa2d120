"""Single puts that leave as a run: their replies, their errors, their results."""

import random

import pytest

from metaq.client.errors import OutcomeUnknownError
from metaq.errors import (
    ConnectionLostError,
    MetaqError,
    NotSentError,
    RequestTimeoutError,
    ServerError,
)
from metaq.peer.connection import BrokerConnection
from metaq.peer.replies import ReceiptColumns
from metaq.protocol.commands import Put, Reply, Result
from metaq.protocol.encoding import encode
from tests.client.asking import CLOCK, run, silent
from tests.client.producing import JAVA, Act, StandInBroker, producing
from tests.client.scripted import ScriptedBroker
from tests.rigs.virtual_time import run_virtually
from tests.rigs.waiting import until

ONE_BROKER = {"ScriptedBroker": "replies come as the test says"}


class Listener:
    """Keeps the outcome of each put."""

    def __init__(self, frames: list[bytes]) -> None:
        self.frames = frames
        self.stored: dict[int, tuple[int, ...]] = {}
        self.calls: list[int] = []
        self.outcomes: list[tuple[list[int], Reply | MetaqError]] = []

    @classmethod
    def submit(
        cls, connection: BrokerConnection, count: int, *, seconds: float = 30.0
    ) -> "Listener":
        opaques = connection.next_opaques(count)
        frames = [encode(Put("t", 0, b"x" * n, 0, 0, n)) for n in opaques]
        listener = cls(frames)
        connection.submit_puts(
            b"".join(frames),
            opaques,
            listener,
            deadline_s=CLOCK.monotonic_s() + seconds,
        )
        return listener

    def sizes(self) -> list[int]:
        return list(map(len, self.frames))

    def on_receipts(self, receipts: ReceiptColumns) -> None:
        assert list(receipts.opaques) == sorted(receipts.opaques)
        self.calls.append(len(receipts.opaques))
        for opaque, *numbers in zip(*receipts, strict=True):
            assert opaque not in self.stored
            self.stored[opaque] = tuple(numbers)

    def on_outcome(self, opaques: list[int], outcome: Reply | MetaqError) -> None:
        self.outcomes.append((list(opaques), outcome))

    @property
    def count(self) -> int:
        return len(self.stored) + sum(len(some) for some, _ in self.outcomes)


def receipt(opaque: int) -> Result:
    return Result(200, b"%d 0 %d" % (-opaque, opaque * 100), opaque)


def write(broker: ScriptedBroker, *replies: Reply) -> None:
    broker.talks[0].transport.write(b"".join(map(encode, replies)))


def test_replies_to_runs_are_paired_in_bulk_and_in_any_order(
    rng: random.Random,
) -> None:
    """One call for all receipts of a run that one read brings; refusals one by one."""

    async def scenario(broker: ScriptedBroker, connection: BrokerConnection) -> None:
        broker.answer = silent
        first, second = (Listener.submit(connection, 50) for _ in range(2))
        assert connection.in_flight_count == 100
        await until(lambda: len(broker.commands) == 101)
        opaques = [c.opaque for c in broker.commands if isinstance(c, Put)]
        refused = Result(403, b"closed", opaques[7])
        rest = [receipt(n) for n in opaques if n != refused.opaque]
        rng.shuffle(rest)
        write(broker, *rest)
        await until(lambda: first.count == 49 and second.count == 50)
        assert first.calls == [49]
        assert second.calls == [50]
        # What came already is dropped, and a refusal is the reply as it is.
        write(broker, rest[0], refused)
        await until(lambda: first.count == 50)
        assert first.outcomes == [([refused.opaque], refused)]
        assert first.stored | second.stored == {
            one.opaque: (-one.opaque, 0, one.opaque * 100) for one in rest
        }
        assert connection.in_flight_count == connection.in_flight_bytes == 0
        assert connection.statistics().unknown_reply_count == 1

    run(scenario)


def test_the_end_of_a_connection_tells_puts_that_never_left_from_others() -> None:
    """The bytes of a run that a full socket did not take were not sent."""

    async def scenario(broker: ScriptedBroker, connection: BrokerConnection) -> None:
        broker.answer = silent
        sent = Listener.submit(connection, 3)
        await until(lambda: len(broker.commands) == 4)
        unsent = Listener.submit(connection, 2)
        write(broker, receipt(connection.next_opaque() - 4))
        connection.close("enough")
        ((lost, error),) = sent.outcomes
        assert len(lost) == 3
        assert isinstance(error, ConnectionLostError)
        ((kept, error),) = unsent.outcomes
        assert len(kept) == 2
        assert isinstance(error, NotSentError)

    run(scenario)


class LackingListener(Listener):
    """Finds no memory for sizes."""

    def sizes(self) -> list[int]:
        raise MemoryError


def test_runs_whose_sizes_find_no_memory_are_in_doubt() -> None:
    """Each run gets its outcome, and so do those who wait for the end."""

    async def scenario(broker: ScriptedBroker, connection: BrokerConnection) -> None:
        broker.answer = silent
        runs = [LackingListener.submit(connection, 2) for _ in range(2)]
        ends: list[str] = []
        connection.on_closed(ends.append)
        connection.close("enough")
        for one in runs:
            ((some, error),) = one.outcomes
            assert len(some) == 2
            assert isinstance(error, ConnectionLostError)
        assert len(ends) == 1

    run(scenario)


@pytest.mark.slow
def test_a_run_that_left_in_part_is_lost_in_part() -> None:
    """Each put is judged by its own bytes."""

    async def scenario(broker: ScriptedBroker, connection: BrokerConnection) -> None:
        broker.answer = silent
        broker.talks[0].transport.pause_reading()
        size, count = 1 << 20, 64
        opaques = connection.next_opaques(count)
        frames = [encode(Put("t", 0, b"x" * size, 0, 0, n)) for n in opaques]
        listener = Listener(frames)
        connection.submit_puts(
            b"".join(frames), opaques, listener, deadline_s=CLOCK.monotonic_s() + 30
        )
        await until(lambda: connection.statistics().queued_bytes < size * count)
        sent_bytes = connection.statistics().sent_bytes
        queued_bytes = connection.statistics().queued_bytes
        before_bytes = sent_bytes - (size * count - queued_bytes)
        connection.close("enough")
        (lost, error), (kept, other) = listener.outcomes
        assert isinstance(error, ConnectionLostError)
        assert isinstance(other, NotSentError)
        assert lost + kept == list(opaques)
        left_bytes = sent_bytes - before_bytes
        assert len(lost) - 1 <= left_bytes / size <= len(lost) + 1

    run(scenario)


@pytest.mark.slow
def test_a_run_has_one_deadline() -> None:
    """Puts without an answer by then are in doubt, all of them at once."""

    async def scenario(broker: ScriptedBroker, connection: BrokerConnection) -> None:
        broker.answer = silent
        listener = Listener.submit(connection, 5, seconds=0.5)
        await until(lambda: len(broker.commands) == 6)
        put = broker.commands[2]
        assert isinstance(put, Put)
        write(broker, receipt(put.opaque))
        await until(lambda: listener.count == 5)
        assert list(listener.stored) == [put.opaque]
        ((opaques, error),) = listener.outcomes
        assert len(opaques) == 4
        assert isinstance(error, RequestTimeoutError)
        assert connection.statistics().timeout_count == 4
        assert connection.in_flight_count == connection.in_flight_bytes == 0

    run(scenario)


def test_results_of_puts_are_their_own_replies() -> None:
    """Ids and offsets of single puts follow no rule: each message has its own."""

    async def main() -> None:
        broker = StandInBroker(capabilities=JAVA)
        broker.acts.extend([Act.STORE, Act.CLOSED, Act.STORE, Act.CLOSED, Act.STORE])
        async with producing(broker) as world:
            payloads = [b"x" * n for n in range(1, 8)]
            results = await world.producer.send_many("test", payloads)
            sent = [each.payload for each in broker.commands if isinstance(each, Put)]
            assert sent == [*payloads, payloads[1], payloads[3]]
            order = [*payloads[:1], *payloads[2:3], *payloads[4:]]
            order += [payloads[1], payloads[3]]
            assert broker.stored() == order
            found = dict(zip(payloads, results, strict=True))
            ends = {}
            for at, payload in enumerate(order):
                ends[payload] = (1 << 30) + at, sum(len(p) + 20 for p in order[:at])
            assert {p: (r.message_id, r.offset) for p, r in found.items()} == ends
            told = world.producer.statistics()
            assert told.acknowledged_count == 7
            assert told.acknowledged_bytes == sum(map(len, payloads))
            assert told.retried_count == 2

    run_virtually(main())


def test_a_put_that_stays_refused_fails_alone() -> None:
    """Its neighbours of the same run are stored, and say where."""

    async def main() -> None:
        broker = StandInBroker(capabilities=JAVA)
        broker.acts.extend([Act.STORE, Act.BROKEN, Act.STORE])
        async with producing(broker) as world:
            futures = [
                await world.producer.send_nowait("test", b"%d" % n) for n in range(3)
            ]
            await world.producer.flush()
            errors = [one.exception() for one in futures]
            assert [error is None for error in errors] == [True, False, True]
            assert isinstance(errors[1], ServerError)
            assert [futures[n].result().offset for n in (0, 2)] == [0, 21]
            told = world.producer.statistics()
            assert (told.acknowledged_count, told.in_flight_count) == (2, 0)

    run_virtually(main())


def test_a_closed_producer_knows_of_each_put_what_was_answered() -> None:
    """A put without an answer is in doubt; one with an answer is stored."""

    async def main() -> None:
        broker = StandInBroker(capabilities=JAVA)
        broker.acts.extend([Act.STORE, Act.SWALLOW, Act.STORE])
        async with producing(broker, timeout_s=30.0) as world:
            futures = [
                await world.producer.send_nowait("test", b"%d" % n) for n in range(3)
            ]
        kinds = [one.exception() is None for one in futures]
        assert kinds == [True, False, True]
        assert isinstance(futures[1].exception(), OutcomeUnknownError)

    run_virtually(main())
