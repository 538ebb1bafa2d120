"""Outcomes of messages: sent again, moved, in doubt, too late, too large."""

import ast
import asyncio
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

import metaq.client
from metaq.client.errors import (
    MessageTooLargeError,
    OutcomeUnknownError,
    PartlySentError,
)
from metaq.client.partitioner import RoundRobin
from metaq.client.produce.batches import SendResult
from metaq.client.produce.buffer import Buffer
from metaq.client.produce.partition_sender import PartitionSender
from metaq.client.produce.requests import Request
from metaq.errors import (
    ClientError,
    ForbiddenError,
    MetaqError,
    NoBrokerError,
    NotSentError,
    ServerError,
    UnavailableError,
)
from metaq.peer.replies import ReceiptColumns
from metaq.protocol.commands import Mput
from metaq.protocol.version import Capabilities
from tests.client.asking import lacking
from tests.client.producing import (
    FORGETFUL,
    JAVA,
    OURS,
    TIMED,
    Act,
    StandInBroker,
    StandInConnection,
    producing,
)
from tests.rigs.virtual_time import run_virtually


def test_a_repeated_batch_is_recognised() -> None:
    """The answer was lost: the same producer and sequence go out again, stored once."""

    async def main() -> None:
        broker = StandInBroker()
        async with producing(broker) as world:
            await world.producer.send("test", b"first")
            broker.acts.append(Act.CUT_STORED)
            result = await world.producer.send("test", b"second")
            assert result.offset == 25
            assert world.producer.statistics().retried_count == 1
        assert broker.stored() == [b"first", b"second"]
        *_, one, two = broker.commands
        assert isinstance(one, Mput)
        assert isinstance(two, Mput)
        assert (one.producer, one.sequence) == (two.producer, two.sequence)
        assert one.sequence == 1

    run_virtually(main())


def test_a_refused_batch_goes_before_one_in_doubt_that_followed() -> None:
    """It keeps its number: the broker has taken none that was in flight with it."""

    async def main() -> None:
        broker = StandInBroker()
        broker.acts.extend([Act.CLOSED, Act.CUT])
        async with producing(broker, batch_count_max=4) as world:
            sent = [b"%d" % n for n in range(5)]
            await world.producer.send_many("test", sent)
        assert broker.stored() == sent
        assert not broker.overlap_count

    run_virtually(main())


def test_a_refused_batch_is_cut_for_a_broker_that_takes_less_now() -> None:
    """Its parts need new numbers, and so does what was in flight with it."""

    async def main() -> None:
        broker = StandInBroker()
        broker.acts.append(Act.BUSY)
        sent = [b"%d" % n for n in range(6)]  # 4 and 2
        async with producing(broker, batch_count_max=4) as world:
            sending = asyncio.create_task(world.producer.send_many("test", sent))
            while len(broker.commands) < 2:
                await asyncio.sleep(0.001)
            assert not broker.stored()
            broker.capabilities = replace(OURS, batch_records_max=2)
            broker.go_away()
            broker.come_back()
            await sending
        assert broker.stored() == sent
        assert not broker.overlap_count

    run_virtually(main())


@pytest.mark.parametrize("is_moved", [False, True])
def test_the_next_batch_is_stored_though_a_refused_one_does_not_come_back(
    *, is_moved: bool
) -> None:
    """Its time is over, or it went to another broker; the numbers have a gap then."""

    async def main() -> None:
        brokers = [StandInBroker(n) for n in range(1 + is_moved)]
        first = brokers[0]
        first.default = Act.CLOSED
        async with producing(*brokers, selector=RoundRobin()) as world:
            while not first.commands:
                with nullcontext() if is_moved else pytest.raises(ForbiddenError):
                    await world.producer.send("test", b"refused", timeout=1)
            await asyncio.sleep(5)
            first.default, count = Act.STORE, len(first.commands)
            for _ in range(2):
                await world.producer.send("test", b"stored")
            assert len(first.stored()) == len(first.commands) - count > 0

    run_virtually(main())


def test_a_refused_batch_with_a_time_gets_a_number_that_does_not_follow() -> None:
    """It would be taken for one that was in flight with the refused one."""

    async def main() -> None:
        broker = StandInBroker(capabilities=TIMED)
        broker.acts.append(Act.CLOSED)
        async with producing(broker) as world:
            await world.producer.send("test", b"later", delay=60)
        assert len(broker.commands) == 2
        assert [payloads for _due, _n, payloads in broker.scheduled] == [[b"later"]]

    run_virtually(main())


def test_a_repetition_travels_alone() -> None:
    """Refused on its second way, it is not overtaken by a later sequence."""

    async def main() -> None:
        broker = StandInBroker()
        broker.acts.extend([Act.CUT, Act.CLOSED])
        async with producing(broker, batch_count_max=4) as world:
            sent = [b"%d" % n for n in range(9)]
            await world.producer.send_many("test", sent)
        assert broker.stored() == sent
        assert not broker.overlap_count

    run_virtually(main())


@pytest.mark.parametrize("capabilities", [OURS, JAVA])
def test_what_is_stored_is_told_though_the_next_batch_finds_no_memory(
    capabilities: Capabilities, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next batch leaves before senders hear of the one that was answered."""
    problems: list[dict[str, object]] = []
    broker, fill = StandInBroker(capabilities=capabilities), PartitionSender.fill

    def lack(sender: PartitionSender) -> None:
        if broker.commands:
            raise MemoryError
        fill(sender)

    async def main() -> None:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _loop, context: problems.append(context))
        async with producing(broker) as world:
            with monkeypatch.context() as patched:
                patched.setattr(PartitionSender, "fill", lack)
                assert (await world.producer.send("test", b"first")).offset == 0

    run_virtually(main())
    assert isinstance(problems[0]["exception"], MemoryError)


@pytest.mark.parametrize(
    ("capabilities", "place", "name", "kind"),
    [
        (OURS, Request, "encode_mput", ClientError),
        (JAVA, Request, "encode_puts", ClientError),
        (OURS, StandInConnection, "submit", OutcomeUnknownError),
        (JAVA, StandInConnection, "submit_puts", OutcomeUnknownError),
    ],
)
def test_a_batch_that_finds_no_memory_fails_alone(
    capabilities: Capabilities,
    place: type,
    name: str,
    kind: type[MetaqError],
) -> None:
    """Its outcome is unknown if the connection may have it; the next is stored."""

    async def main() -> None:
        broker = StandInBroker(capabilities=capabilities)
        async with producing(broker) as world:
            lost = pytest.raises(MetaqError, match="no memory to send")
            with lacking(place, name), lost as raised:
                await world.producer.send("test", b"lost")
            assert raised.type is kind
            assert (await world.producer.send("test", b"next")).offset == 0
        assert broker.stored() == [b"next"]

    run_virtually(main())


@pytest.mark.parametrize(
    ("capabilities", "place", "name"),
    [(OURS, Request, "outcome_of"), (JAVA, Request, "on_receipts")],
)
def test_a_receipt_that_finds_no_memory_leaves_its_messages_in_doubt(
    capabilities: Capabilities, place: object, name: str
) -> None:
    """Its connection has reported the reply, and reports nothing at the deadline."""
    problems: list[dict[str, object]] = []

    async def main() -> None:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _loop, context: problems.append(context))
        broker = StandInBroker(capabilities=capabilities)
        async with producing(broker, timeout_s=1) as world:
            unknown = pytest.raises(OutcomeUnknownError, match="no answer within 1 s")
            with lacking(place, name), unknown:
                async with asyncio.timeout(2):
                    await world.producer.send("test", b"stored")
            await world.producer.send("test", b"next")
        assert broker.stored() == [b"stored", b"next"]

    run_virtually(main())
    assert isinstance(problems[0]["exception"], MemoryError)


@pytest.mark.parametrize(
    ("acts", "place", "name", "kinds"),
    [
        ([Act.STORE], Request, "outcomes", [type(None)]),
        ([Act.STORE, Act.BUSY], Request, "outcomes", [type(None), OutcomeUnknownError]),
        ([Act.STORE, Act.BUSY], Request, "cut", [type(None), OutcomeUnknownError]),
    ],
)
def test_puts_whose_last_answer_finds_no_memory_have_outcomes_at_their_deadline(
    acts: list[Act], place: type, name: str, kinds: list[type]
) -> None:
    """A put that was noted as stored is a success; one that was not is unknown."""
    problems: list[dict[str, object]] = []

    async def main() -> None:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _loop, context: problems.append(context))
        broker = StandInBroker(capabilities=JAVA)
        broker.acts.extend(acts)
        async with producing(broker, timeout_s=1) as world:
            send = world.producer.send_nowait
            with lacking(place, name):
                futures = [await send("test", b"%d" % n) for n in range(len(acts))]
                await asyncio.sleep(0.5)
            await world.producer.flush(timeout=1)
            assert [type(one.exception()) for one in futures] == kinds
            assert world.producer.statistics().in_flight_count == 0

    run_virtually(main())
    assert [type(one["exception"]) for one in problems] == [MemoryError]


def test_deadlines_are_kept_behind_a_tick_that_failed() -> None:
    """The loop gets the error, and the next tick comes."""
    problems: list[dict[str, object]] = []

    async def main() -> None:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _loop, context: problems.append(context))
        broker = StandInBroker()
        async with producing(broker, timeout_s=1) as world:
            broker.go_away()
            future = await world.producer.send_nowait("test", b"one")
            with (
                lacking(Buffer, "take_due", times=3),
                pytest.raises(MetaqError),
            ):
                await asyncio.wait_for(future, 5)

    run_virtually(main())
    assert [type(one["exception"]) for one in problems] == 3 * [MemoryError]


class _Lacking(list[int]):
    """Numbers of which only the first can be read."""

    def __iter__(self) -> Iterator[int]:
        yield self[0]
        raise MemoryError


def test_receipts_that_find_no_memory_midway_leave_the_rest_in_doubt() -> None:
    """At its deadline each message has an outcome, and none is in flight any more."""

    async def main() -> None:
        broker = StandInBroker(capabilities=JAVA)
        broker.default = Act.SWALLOW
        async with producing(broker, timeout_s=1) as world:
            send = world.producer.send_nowait
            futures = [await send("test", b"%d" % n) for n in range(3)]
            await asyncio.sleep(0.5)
            assert broker.connection is not None
            (first, on_reply), _, (last, _) = broker.connection.in_flight.items()
            broker.connection.in_flight.clear()
            assert isinstance(on_reply, partial)
            some = _Lacking([first, last])
            with pytest.raises(MemoryError):
                on_reply.args[0].on_receipts(
                    ReceiptColumns(some, [5, 6], [0, 0], [0, 42])
                )
            await world.producer.flush(timeout=1)
            kinds = [type(one.exception()) for one in futures]
            assert kinds == [type(None), OutcomeUnknownError, OutcomeUnknownError]
            assert world.producer.statistics().in_flight_count == 0

    run_virtually(main())


@pytest.mark.parametrize("capabilities", [FORGETFUL, JAVA])
@pytest.mark.parametrize("retry_unknown", [True, False])
def test_brokers_that_forget_get_it_twice_or_the_error_says_so(
    capabilities: Capabilities, retry_unknown: bool
) -> None:
    """`retry_unknown` chooses between a duplicate and `OutcomeUnknownError`."""

    async def main() -> None:
        broker = StandInBroker(capabilities=capabilities)
        broker.acts.append(Act.CUT_STORED)
        async with producing(broker, retry_unknown=retry_unknown) as world:
            if retry_unknown:
                await world.producer.send("test", b"x")
                assert broker.stored() == [b"x", b"x"]
            else:
                with pytest.raises(OutcomeUnknownError, match="outcome unknown"):
                    await world.producer.send("test", b"x")
                assert broker.stored() == [b"x"]

    run_virtually(main())


@pytest.mark.parametrize(
    ("act", "error"),
    [
        (Act.CLOSED, ForbiddenError),
        (Act.BUSY, UnavailableError),
        (Act.BROKEN, ServerError),
        (Act.SWALLOW, OutcomeUnknownError),
        (Act.SWALLOW_STORED, OutcomeUnknownError),
        (Act.CUT, OutcomeUnknownError),
        (Act.CUT_STORED, OutcomeUnknownError),
    ],
)
def test_a_failure_that_stays_ends_at_the_deadline(
    act: Act, error: type[MetaqError]
) -> None:
    """The error says whether the message may be stored, and nothing hangs."""

    async def main() -> None:
        loop = asyncio.get_running_loop()
        broker = StandInBroker(capabilities=FORGETFUL)
        broker.default = act
        async with producing(broker, timeout_s=2) as world:
            start_s = loop.time()
            with pytest.raises(error) as caught:
                await world.producer.send("test", b"x")
            assert type(caught.value) is error
            assert loop.time() - start_s <= 2.5
            assert (loop.time() - start_s < 1) == (act is Act.BROKEN)
            failed = world.producer.statistics().failed
            assert failed == {error.__name__: 1}

    run_virtually(main())


def test_a_broker_that_never_comes_is_named_at_the_deadline() -> None:
    """Certainly not stored; the error names the unreachable broker."""

    async def main() -> None:
        broker = StandInBroker()
        broker.go_away()
        async with producing(broker, timeout_s=2) as world:
            with pytest.raises(NoBrokerError, match="stand-in:1000"):
                await world.producer.send("test", b"x")
            with pytest.raises(NoBrokerError, match="topic other"):
                await world.producer.send("other", b"x", timeout=0.5)

    run_virtually(main())


def test_messages_behind_an_old_batch_keep_their_own_time() -> None:
    """A message sent nine seconds later does not fail with the first."""

    async def main() -> None:
        broker = StandInBroker()
        broker.go_away()
        async with producing(broker, timeout_s=10) as world:
            old = await world.producer.send_nowait("test", b"old")
            await asyncio.sleep(8)
            new = await world.producer.send_nowait("test", b"new")
            await asyncio.sleep(4)
            assert old.done()
            assert not new.done()
            broker.come_back()
            await new
        assert broker.stored() == [b"new"]

    run_virtually(main())


def test_a_queue_too_long_for_the_deadline_fails_as_not_sent() -> None:
    """The broker is slow: what could not leave in time is certainly not stored."""

    async def main() -> None:
        broker = StandInBroker()
        broker.delay_s = 0.8
        options = {"timeout_s": 1.0, "batch_count_max": 1, "in_flight_batches_max": 1}
        async with producing(broker, **options) as world:
            futures = [await world.producer.send_nowait("test", b"x") for _ in "abc"]
            assert isinstance(await futures[0], SendResult)
            with pytest.raises(NotSentError, match="not sent within 1 s"):
                await futures[2]

    run_virtually(main())


def test_a_list_that_fails_in_part_tells_of_each_message() -> None:
    """`PartlySentError.outcomes` has a result or an error for every message."""

    async def main() -> None:
        broker = StandInBroker()
        broker.acts.extend([Act.STORE, Act.BROKEN, Act.STORE])
        async with producing(broker, batch_count_max=2) as world:
            with pytest.raises(PartlySentError, match="2 of 6") as caught:
                await world.producer.send_many("test", [b"x"] * 6)
            kinds = [type(outcome) for outcome in caught.value.outcomes]
            assert kinds == [SendResult] * 2 + [ServerError] * 2 + [SendResult] * 2
            broker.acts.extend([Act.BROKEN])
            with pytest.raises(ServerError, match="as the test says"):
                await world.producer.send_many("test", [b"x"] * 2)

    run_virtually(main())


def test_too_large_messages_are_refused_before_they_leave() -> None:
    """Broker's limit and buffer's limit, both with both numbers."""

    async def main() -> None:
        limited = Capabilities("1.0", has_mput=True, payload_bytes_max=100)
        broker = StandInBroker(capabilities=limited)
        async with producing(broker, buffer_bytes_max=1000) as world:
            send = world.producer.send
            with pytest.raises(MessageTooLargeError, match=r"at most 1000 .* got 1021"):
                await send("test", bytes(1001))
            await send("test", bytes(100))
            with pytest.raises(MessageTooLargeError, match=r"at most 100 .* got 101"):
                await send("test", bytes(101))
            with pytest.raises(MessageTooLargeError, match=r"at most 100 .* got 101"):
                await world.producer.send_many("test", [b"x", bytes(101)])
        assert broker.stored() == [bytes(100)]

    run_virtually(main())


def test_a_message_too_large_fails_alone() -> None:
    """Also when its batch was made before the broker's limit was known."""

    async def main() -> None:
        limited = Capabilities(
            "1.0",
            has_mput=True,
            payload_bytes_max=100,
            batch_bytes_max=5000,
            batch_records_max=9,
        )
        broker = StandInBroker(capabilities=limited)
        async with producing(broker) as world:
            messages = [b"a", b"b", bytes(101), b"c", bytes(100), bytes(999)]
            with pytest.raises(PartlySentError, match="2 of 6") as caught:
                await world.producer.send_many("test", messages)
            assert isinstance(caught.value.outcomes[2], MessageTooLargeError)
            assert isinstance(caught.value.outcomes[5], MessageTooLargeError)
        assert broker.stored() == [b"a", b"b", b"c", bytes(100)]

    run_virtually(main())


def test_a_broker_that_takes_more_when_it_is_back_is_given_more() -> None:
    """Limits are those of a connection; they refuse nothing when it is lost."""

    async def main() -> None:
        broker = StandInBroker(
            capabilities=Capabilities("1.0", has_mput=True, payload_bytes_max=100)
        )
        async with producing(broker) as world:
            await world.producer.send("test", b"a")
            with pytest.raises(MessageTooLargeError, match=r"at most 100 .* got 101"):
                await world.producer.send("test", bytes(101))
            broker.go_away()
            broker.capabilities = Capabilities(
                "1.0", has_mput=True, payload_bytes_max=200
            )
            broker.come_back()
            await world.producer.send("test", bytes(101))
            with pytest.raises(MessageTooLargeError, match=r"at most 200 .* got 201"):
                await world.producer.send("test", bytes(201))
        assert broker.stored() == [b"a", bytes(101)]

    run_virtually(main())


def test_announced_batch_limits_are_kept() -> None:
    """Batches appended before the broker was known are cut; a large record is a put."""

    async def main() -> None:
        small = Capabilities(
            "1.0", has_mput=True, batch_bytes_max=200, batch_records_max=3
        )
        broker = StandInBroker(capabilities=small)
        async with producing(broker) as world:
            sent = [b"%d" % n for n in range(10)] + [bytes(300)] + [b"y" * 100] * 4
            await world.producer.send_many("test", sent)
            await world.producer.send_many("test", sent)
        assert broker.stored() == sent * 2
        for command in broker.commands:
            if isinstance(command, Mput):
                assert len(command.payload) <= 200
                assert command.count <= 3

    run_virtually(main())


def test_a_cancelled_close_leaves_no_message_without_an_outcome() -> None:
    """Threads that wait for such a message would wait for ever."""

    async def close_for(turns: int) -> bool:
        broker = StandInBroker()
        broker.is_up = False
        async with producing(broker) as world:
            future = await world.producer.send_nowait("test", b"m")
            await asyncio.sleep(0)
            closing = asyncio.ensure_future(world.producer.close(timeout=0))
            for _ in range(turns):
                await asyncio.sleep(0)
            is_cancelled = closing.cancel()
            await asyncio.gather(closing, return_exceptions=True)
            assert future.done(), turns
            assert isinstance(future.exception(), MetaqError)
        return is_cancelled

    async def main() -> None:
        turns = 1
        while await close_for(turns):
            turns += 1
        assert turns > 2

    run_virtually(main())


@pytest.mark.slow
def test_no_field_of_a_partition_sender_is_written_from_outside() -> None:
    """Not in the rooms of the client: its methods are the only way."""
    fields = {name for name in PartitionSender.__slots__ if not name.startswith("_")}
    fields.remove("partition")  # a request has one too
    faults = []
    for path in Path(metaq.client.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_bytes())):
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                is_own = isinstance(node.value, ast.Name) and node.value.id == "self"
                if node.attr in fields and not is_own:
                    faults.append(f"{path.name}:{node.lineno} writes {node.attr}")
    assert faults == []
