"""One broker of a queue, replaced by a script: takes, leases, connections."""

import asyncio
import random
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from metaq.client.cluster.context import ClientContext
from metaq.client.errors import QueueGroupError
from metaq.client.options import ClientOptions, QueueOptions
from metaq.client.queue.broker_link import UNANSWERED_MAX, BrokerLink
from metaq.client.queue.prefetch import (
    HeldMessage,
    HeldState,
    Prefetch,
    QueueParts,
    QueueStatistics,
)
from metaq.client.queue.settling import (
    GRACE_S,
    UNKNOWN_TO_SETTLES_S,
    UNKNOWN_TO_TAKES_S,
    Settling,
)
from metaq.clock import SystemClock
from metaq.cluster_snapshot import BrokerCopies
from metaq.errors import MetaqError, NoBrokerError, NotSentError
from metaq.model import BrokerId, MessageId, Offset
from metaq.peer.pool import ConnectionPool
from metaq.protocol.commands import (
    Check,
    Command,
    Reply,
    Result,
    Settle,
    Take,
    Value,
    Version,
)
from metaq.protocol.encoding import encode
from metaq.protocol.queue_frames import (
    GROUP_DELAY,
    QueueDelivery,
    Settlement,
    SettleVerb,
    Word,
    decode_settlements,
    encode_taken,
    encode_words,
)
from metaq.protocol.version import Capabilities, encode_version_body
from metaq.record.layout import encode_record
from metaq.record.runs import RecordRun, encode_runs
from tests.client.scripted import CLOCK, ScriptedBroker
from tests.client.worlds import QUICK
from tests.rigs.waiting import until

OURS = Capabilities("test", queues=True, check=True, wait_ms_max=10_000)
RECORD = encode_record(b"payload", id=MessageId(1), flag=0)
SIZE = len(RECORD)


class Script:
    """A broker that keeps takes until the test gives them something."""

    def __init__(self) -> None:
        self.capabilities = OURS
        self.takes: list[Take] = []
        self.said: list[Settlement] = []
        self.checks: list[Check] = []
        self.settle_count = 0
        self.refusal: bytes | None = None
        self.settle_refusal: bytes | None = None
        self.settle_status = 404

    def answer(self, command: Command) -> Reply | None:
        if isinstance(command, Version):
            body = encode_version_body(self.capabilities)
            return Result(200, body.encode(), command.opaque)
        if isinstance(command, Take):
            self.takes.append(command)
            if self.refusal is not None:
                return Result(503, self.refusal, command.opaque)
            return None
        if isinstance(command, Check):
            self.checks.append(command)
            return Result(200, b"", command.opaque)
        assert isinstance(command, Settle)
        entries = decode_settlements(command.payload, command.count)
        self.said += entries
        self.settle_count += 1
        if self.settle_refusal is not None:
            return Result(self.settle_status, self.settle_refusal, command.opaque)
        words = encode_words([Word.OK] * len(entries))
        return Result(200, words, command.opaque)


class SkippingClock(SystemClock):
    """The machine's clock, some time ahead."""

    ahead_s = 0.0

    def monotonic_s(self) -> float:
        return super().monotonic_s() + self.ahead_s


class Recorder(Prefetch):
    """Keeps what it was given."""

    def __init__(self) -> None:
        super().__init__(CLOCK)
        self.taken: list[HeldMessage] = []

    def put(self, messages: Sequence[HeldMessage]) -> bool:
        is_taken = super().put(messages)
        if is_taken:
            self.taken += messages
        return is_taken


class Rig:
    """A link to a scripted broker, and what it hands over."""

    def __init__(self, broker: ScriptedBroker, **options: Any) -> None:
        self.broker = broker
        self.script = Script()
        broker.answer = self.script.answer
        self.prefetch = Recorder()
        self.taken = self.prefetch.taken
        self.clock = SkippingClock()
        settings = ClientOptions(**QUICK)
        pool = ConnectionPool(
            clock=CLOCK, options=settings, loop=asyncio.get_running_loop()
        )
        self.pool = pool
        copies = {BrokerId(0): BrokerCopies(leader=broker.address, followers={})}
        context: Any = SimpleNamespace(
            clock=self.clock,
            pool=pool,
            metadata=SimpleNamespace(
                snapshot=SimpleNamespace(brokers=copies), request_refresh=lambda: None
            ),
            deadline_s=lambda *_: CLOCK.monotonic_s() + 30,
        )
        context.connect_leader = partial(ClientContext.connect_leader, context)
        chosen = QueueOptions(**options)
        parts = QueueParts(
            context,
            "orders",
            "workers",
            "w-1",
            chosen,
            self.prefetch,
            QueueStatistics("workers"),
            chosen.prefetch,
        )
        self.parts = parts
        self.link = BrokerLink(BrokerId(0), parts)
        self.task = asyncio.create_task(self.link.run())

    @property
    def fatal(self) -> MetaqError | None:
        """Why no message will ever come."""
        return self.prefetch.error

    async def take(self, number: int) -> Take:
        """Return the take of this number, as soon as it has come."""
        await until(lambda: len(self.script.takes) > number)
        return self.script.takes[number]

    def give(self, take: Take, offsets: Sequence[int], records: bytes = b"") -> None:
        """Answer a take with messages."""
        deliveries = [QueueDelivery(Offset(one), 100 + one, 1) for one in offsets]
        data = records or RECORD * len(offsets)
        runs = encode_runs([RecordRun(Offset(offsets[0]), data)] if offsets else [])
        payload = encode_taken(0, 30_000, deliveries) + runs
        self.broker.talks[-1].transport.write(encode(Value(payload, take.opaque)))

    async def close(self) -> None:
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)
        await self.pool.close(deadline_s=CLOCK.monotonic_s())


def run(scenario: Callable[[Rig], Awaitable[None]], **options: Any) -> None:
    async def main() -> None:
        async with ScriptedBroker() as broker:
            rig = Rig(broker, **options)
            try:
                await scenario(rig)
            finally:
                await rig.close()

    asyncio.run(main())


def test_a_take_asks_for_what_there_is_room_for_and_again_at_half() -> None:
    """One in flight at a time, from any partition, with a wait."""

    async def scenario(rig: Rig) -> None:
        first = await rig.take(0)
        assert (first.count, first.partition, first.worker) == (4, -1, "w-1")
        assert first.wait_ms > 0
        rig.give(first, [0, SIZE, 2 * SIZE])
        await until(lambda: len(rig.taken) == 3)
        # Three of four are here: none is asked for before half are gone.
        await asyncio.sleep(0.02)
        assert len(rig.script.takes) == 1
        rig.link.settle([Settling(rig.taken[0], SettleVerb.ACK)])
        rig.link.flush()
        second = await rig.take(1)
        assert second.count == 2

    run(scenario, prefetch=4)


def test_a_take_asks_for_what_is_left_when_no_message_waits() -> None:
    """Workers do not wait for others that take long, while there is room."""

    async def scenario(rig: Rig) -> None:
        rig.give(await rig.take(0), [0, SIZE, 2 * SIZE])
        await until(lambda: len(rig.taken) == 3)
        for _ in range(2):
            assert rig.prefetch.take_nowait() is not None
        await asyncio.sleep(0.02)
        assert len(rig.script.takes) == 1
        assert rig.prefetch.take_nowait() is not None
        assert (await rig.take(1)).count == 1

    run(scenario, prefetch=4)


def test_no_worker_is_left_waiting_while_there_is_room(rng: random.Random) -> None:
    """In any order of replies, settles and messages handed out, also to threads."""

    async def scenario(rig: Rig) -> None:
        acts = ("reply", "settle", "take", "take in a thread")
        given = 0
        begun = list[HeldMessage]()
        for _ in range(600):
            has_asked = len(rig.script.takes) > given
            match rng.choices(acts, (3, 1, 4, 2))[0]:
                case "reply" if has_asked:
                    take = rig.script.takes[given]
                    given += 1
                    first = len(rig.taken)
                    count = rng.randint(1, take.count)
                    rig.give(take, [SIZE * (first + n) for n in range(count)])
                    await until(lambda end=first + count: len(rig.taken) == end)
                case "settle" if begun:
                    one = begun.pop(rng.randrange(len(begun)))
                    rig.link.settle([Settling(one, SettleVerb.ACK)])
                    rig.link.flush()
                case "take" if one := rig.prefetch.take_nowait():
                    begun.append(one)
                case "take in a thread" if one := await asyncio.to_thread(
                    rig.prefetch.take_nowait
                ):
                    begun.append(one)
            assert len(rig.link.held) <= 8
            if not rig.prefetch.has_ready and len(rig.link.held) < 8:
                await rig.take(given)

    run(scenario, prefetch=8)


def test_a_worker_with_a_prefetch_of_one_has_one_message() -> None:
    """A busy one holds nothing that another could handle."""

    async def scenario(rig: Rig) -> None:
        rig.give(await rig.take(0), [0])
        await until(lambda: bool(rig.taken))
        await asyncio.sleep(0.02)
        assert [one.count for one in rig.script.takes] == [1]
        rig.link.settle([Settling(rig.taken[0], SettleVerb.ACK)])
        rig.link.flush()
        await rig.take(1)

    run(scenario, prefetch=1)


def test_a_settle_leaves_with_the_next_take() -> None:
    """The broker has both at once: nothing that comes is waited for with no take."""

    async def scenario(rig: Rig) -> None:
        rig.give(await rig.take(0), [0])
        await until(lambda: bool(rig.taken))
        done = asyncio.Future[None]()
        rig.link.settle([Settling(rig.taken[0], SettleVerb.ACK, future=done)])
        rig.link.flush()
        (connection,) = rig.pool.statistics().connections
        assert connection.in_flight_count == 2

    run(scenario, prefetch=1)


def test_acks_that_gather_leave_at_the_end_at_once() -> None:
    """A close sends them, also one that waits for no answer."""

    async def scenario(rig: Rig) -> None:
        rig.give(await rig.take(0), [0])
        await until(lambda: bool(rig.taken))
        rig.link.settle([Settling(rig.taken[0], SettleVerb.ACK)])
        rig.link.flush()
        (before,) = rig.pool.statistics().connections
        rig.link.stop_taking()
        rig.link.flush()
        (after,) = rig.pool.statistics().connections
        assert after.request_count == before.request_count + 2
        await until(lambda: bool(rig.script.said))

    run(scenario, prefetch=1)


@pytest.mark.slow
@pytest.mark.parametrize("is_own", [True, False])
def test_settles_without_an_answer_hold_up_takes_from_their_broker_alone(
    *, is_own: bool
) -> None:
    """At the bound nothing more is taken from it; from others all goes on."""

    async def scenario(rig: Rig) -> None:
        rig.give(await rig.take(0), [0])
        await until(lambda: bool(rig.taken))
        slow = rig.link if is_own else BrokerLink(BrokerId(1), rig.parts)
        for _ in range(UNANSWERED_MAX):
            slow.settle([Settling(rig.taken[0], SettleVerb.EXTEND)])
        rig.link.settle([Settling(rig.taken[0], SettleVerb.ACK)])
        rig.link.wake()
        if is_own:
            await asyncio.sleep(0.1)
            assert len(rig.script.takes) == 1
        else:
            await rig.take(1)

    run(scenario, prefetch=1)


def test_what_comes_while_nothing_is_read_has_no_more_than_the_rest_of_its_lease() -> (
    None
):
    """A worker that was stopped does not begin what others may have done by then."""

    async def scenario(rig: Rig) -> None:
        take = await rig.take(0)
        rig.clock.ahead_s = 5.0
        for _ in range(2):
            rig.link.keep_up(rig.clock.monotonic_s())
        rig.give(take, [0])
        await until(lambda: len(rig.taken) == 1)
        assert rig.taken[0].lease_end_s > rig.clock.monotonic_s() + 25
        take = await rig.take(1)
        rig.clock.ahead_s = 36.0
        # The look at the leases may come first when the process goes on.
        rig.link.keep_up(rig.clock.monotonic_s())
        rig.give(take, [SIZE])
        await until(lambda: len(rig.taken) == 2)
        assert rig.taken[1].lease_end_s < rig.clock.monotonic_s()

    run(scenario)


def test_bytes_are_bounded_as_messages_are() -> None:
    async def scenario(rig: Rig) -> None:
        first = await rig.take(0)
        assert first.max_size == 2 * SIZE
        rig.give(first, [0, SIZE])
        await until(lambda: len(rig.taken) == 2)
        await asyncio.sleep(0.02)
        assert len(rig.script.takes) == 1

    run(scenario, prefetch_bytes=2 * SIZE)


def test_a_message_against_its_checksum_is_given_back_and_no_other() -> None:
    """With the delay of the group; those before and after it are handed out."""

    async def scenario(rig: Rig) -> None:
        damaged = RECORD[:-1] + bytes([RECORD[-1] ^ 1])
        records = RECORD + damaged + RECORD
        rig.give(await rig.take(0), [0, SIZE, 2 * SIZE], records)
        await until(lambda: len(rig.script.said) == 1)
        assert [one.offset for one in rig.taken] == [0, 2 * SIZE]
        (said,) = rig.script.said
        assert (said.offset, said.verb, said.argument) == (
            SIZE,
            SettleVerb.NACK,
            GROUP_DELAY,
        )
        # The broker hears of it: it mends what it has, or stops there.
        (asked,) = rig.script.checks
        assert (asked.topic, asked.partition, asked.offset) == ("orders", 0, SIZE)

    run(scenario)


def test_what_comes_after_the_end_of_the_queue_is_released() -> None:
    """Its take was on its way then: nobody waits for the end of a lease."""

    async def scenario(rig: Rig) -> None:
        take = await rig.take(0)
        rig.prefetch.drain()
        rig.task.cancel()
        rig.give(take, [0, SIZE])
        await until(lambda: len(rig.script.said) == 2)
        assert {one.verb for one in rig.script.said} == {SettleVerb.RELEASE}
        assert not rig.link.held

    run(scenario)


def test_a_new_connection_hears_first_what_is_held() -> None:
    """Before the leases of the lost one end, also where there is no room for more."""

    async def scenario(rig: Rig) -> None:
        rig.give(await rig.take(0), [0, SIZE])
        await until(lambda: len(rig.taken) == 2)
        rig.broker.commands.clear()
        rig.broker.cut()
        await until(lambda: len(rig.script.said) == 2)
        assert {(one.offset, one.verb) for one in rig.script.said} == {
            (0, SettleVerb.EXTEND),
            (SIZE, SettleVerb.EXTEND),
        }
        kinds = [type(one) for one in rig.broker.commands]
        assert kinds[:2] == [Version, Settle]

    run(scenario, prefetch=2)


@pytest.mark.slow
def test_a_take_that_fails_in_the_pause_after_another_failure_is_sent_again() -> None:
    """It was on its way over the former connection when no leader was to be found."""

    async def scenario(rig: Rig) -> None:
        await rig.take(0)
        brokers = rig.parts.context.metadata.snapshot.brokers
        copies = brokers.pop(BrokerId(0))
        rig.link.wake()
        await until(lambda: isinstance(rig.link.last_error, NoBrokerError))
        brokers[BrokerId(0)] = copies
        rig.broker.talks[-1].transport.abort()
        await rig.take(1)

    run(scenario)


def test_a_lease_is_renewed_when_a_third_of_it_is_over() -> None:
    async def scenario(rig: Rig) -> None:
        rig.give(await rig.take(0), [0])
        await until(lambda: bool(rig.taken))
        (one,) = rig.taken
        rig.link.keep_up(one.lease_end_s - 21)
        assert not one.is_renewing
        rig.link.keep_up(one.lease_end_s - 19)
        rig.link.keep_up(one.lease_end_s - 18)
        await until(lambda: not one.is_renewing)
        (said,) = rig.script.said
        assert (said.verb, said.argument) == (SettleVerb.EXTEND, 30_000)

    run(scenario)


def test_a_message_whose_lease_is_over_is_not_handed_out() -> None:
    """Another worker may have it."""

    async def scenario(rig: Rig) -> None:
        rig.give(await rig.take(0), [0])
        await until(lambda: bool(rig.taken))
        (one,) = rig.taken
        rig.link.keep_up(one.lease_end_s)
        assert (one.state, rig.link.held) == (HeldState.LOST, set())
        assert rig.parts.counts.lost_count == 1
        assert rig.script.said == []

    run(scenario)


def test_a_settle_that_cannot_be_sent_ends_some_seconds_after_the_lease() -> None:
    """Its caller does not wait for a broker that does not return."""

    async def scenario(rig: Rig) -> None:
        rig.give(await rig.take(0), [0])
        await until(lambda: bool(rig.taken))
        (one,) = rig.taken
        future = asyncio.Future[None]()
        rig.link.settle([Settling(one, SettleVerb.ACK, future=future)])
        rig.link.keep_up(one.lease_end_s + GRACE_S)
        assert isinstance(future.exception(), NotSentError)

    run(scenario)


def test_a_message_that_waits_for_too_long_is_released_at_once() -> None:
    """Another worker may be idle; no other event has to come first."""

    async def scenario(rig: Rig) -> None:
        rig.give(await rig.take(0), [0])
        await until(lambda: bool(rig.taken))
        (one,) = rig.taken
        await rig.take(1)
        rig.link.keep_up(one.lease_end_s - 19)
        await until(lambda: bool(rig.script.said))
        assert [said.verb for said in rig.script.said] == [SettleVerb.RELEASE]
        assert (one.state, rig.link.held) == (HeldState.SETTLED, set())

    run(scenario, handle_s_max=5)


def test_renewals_that_are_refused_are_one_line_of_the_log(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Of all messages, however often: a deleted topic wrote two hundred a second."""

    async def scenario(rig: Rig) -> None:
        rig.give(await rig.take(0), [n * SIZE for n in range(5)])
        await until(lambda: len(rig.taken) == 5)
        rig.script.settle_refusal = b"no such topic"
        end_s = rig.taken[0].lease_end_s
        for number in range(1, 4):
            rig.link.keep_up(end_s - 19)
            await until(lambda: rig.script.settle_count == number)  # noqa: B023
            await until(lambda: not any(each.is_renewing for each in rig.taken))
        lines = [each for each in caplog.messages if each.startswith("not settled")]
        assert lines == [
            "not settled: group=workers verb=extend messages=5: no such topic"
        ]
        rig.script.settle_refusal = None
        rig.link.keep_up(end_s - 19)
        await until(lambda: rig.script.settle_count == 4)
        await until(lambda: not any(each.is_renewing for each in rig.taken))
        rig.script.settle_refusal = b"gone again"
        rig.link.keep_up(max(each.lease_end_s for each in rig.taken) - 19)
        await until(lambda: rig.script.settle_count == 5)
        await until(lambda: "gone again" in caplog.text)

    run(scenario)


def test_a_broker_without_queue_groups_is_named() -> None:
    async def scenario(rig: Rig) -> None:
        rig.script.capabilities = Capabilities("0.9")
        await until(lambda: rig.fatal)
        text = f"broker 0 at {rig.broker.address} does not support queue groups: its"
        assert str(rig.fatal).startswith(text)
        assert not rig.script.takes

    run(scenario)


@pytest.mark.slow
def test_a_group_that_a_broker_does_not_know_is_asked_for_some_seconds() -> None:
    """It may not have heard of it yet; then the queue ends with its sentence."""

    async def scenario(rig: Rig) -> None:
        rig.script.refusal = b"no queue group 'workers' here [not-defined]"
        await rig.take(1)
        assert not rig.fatal
        rig.clock.ahead_s = UNKNOWN_TO_TAKES_S
        await until(lambda: rig.fatal)
        assert "no longer has queue group 'workers' as it was" in str(rig.fatal)

    run(scenario)


def test_a_settle_knows_for_how_long_takes_were_refused() -> None:
    """It ends with its first answer, where they were refused for long enough."""

    async def scenario(rig: Rig) -> None:
        first = await rig.take(0)
        rig.script.refusal = b"no queue group 'workers' here [not-defined]"
        rig.script.settle_refusal, rig.script.settle_status = rig.script.refusal, 503
        rig.give(first, [0])
        await rig.take(2)
        rig.clock.ahead_s = UNKNOWN_TO_SETTLES_S
        future = asyncio.get_running_loop().create_future()
        rig.link.settle([Settling(rig.taken[0], SettleVerb.ACK, future=future)])
        rig.link.flush()
        with pytest.raises(QueueGroupError, match="no longer has queue group"):
            await future
        assert rig.script.settle_count == 1
        assert not rig.fatal

    run(scenario)


def test_a_group_that_becomes_known_in_time_is_taken_from() -> None:
    async def scenario(rig: Rig) -> None:
        rig.script.refusal = b"no queue group 'workers' here [not-defined]"
        await rig.take(0)
        rig.script.refusal = None
        rig.give(await rig.take(1), [0])
        await until(lambda: len(rig.taken) == 1)
        assert not rig.fatal

    run(scenario)


def test_a_refusal_for_good_ends_the_queue_with_the_sentence_of_the_broker() -> None:
    async def scenario(rig: Rig) -> None:
        take = await rig.take(0)
        text = b"group 'workers' is of topic 'other', not of 'orders'"
        reply = Result(500, text, take.opaque)
        rig.broker.talks[-1].transport.write(encode(reply))
        await until(lambda: rig.fatal)
        assert str(rig.fatal) == text.decode()

    run(scenario)


@pytest.mark.slow
def test_empty_answers_that_come_at_once_do_not_make_it_spin() -> None:
    async def scenario(rig: Rig) -> None:
        answer = rig.script.answer

        def empty(command: Command) -> Reply | None:
            reply = answer(command)
            if isinstance(command, Take):
                return Value(encode_taken(0, 30_000, []), command.opaque)
            return reply

        rig.broker.answer = empty
        await rig.take(1)  # it goes on
        await asyncio.sleep(0.3)
        assert len(rig.script.takes) < 10

    run(scenario)
