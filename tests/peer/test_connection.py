"""One pipelined connection: pairing, deadlines, heartbeats, and how it ends."""

import asyncio
import itertools
import random
import socket
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from metaq.errors import (
    ClosedError,
    ConnectionLostError,
    MetaqError,
    NoBrokerError,
    NotSentError,
    RequestTimeoutError,
)
from metaq.model import BrokerAddress
from metaq.peer.connection import BrokerConnection
from metaq.peer.pool import open_connection
from metaq.peer.replies import (
    ReceiptColumns,
    parse_receipt,
    take_receipts,
    take_results,
)
from metaq.protocol.commands import Reply, Result, Stats, Value, Version
from metaq.protocol.connection import NEED_DATA, Connection, Role, WireLimits
from metaq.protocol.encoding import encode
from tests.client.asking import (
    CLOCK,
    OPTIONS,
    Asker,
    connected,
    echo,
    run,
    silent,
    soon,
)
from tests.client.memory_broker import OURS
from tests.client.scripted import ScriptedBroker, Talk, free_address
from tests.rigs.waiting import until

ONE_BROKER = {"ScriptedBroker": "replies come as the test says, byte by byte"}


def test_open_learns_what_the_broker_can_do() -> None:
    """Capabilities come from the version reply, before anything else is sent."""

    async def scenario(broker: ScriptedBroker, connection: BrokerConnection) -> None:
        assert connection.capabilities == OURS
        assert connection.is_open
        assert connection.peer == f"127.0.0.1:{broker.address.port}"
        assert [type(command) for command in broker.commands] == [Version]

    run(scenario)


def test_requests_of_one_turn_leave_together_and_are_all_answered() -> None:
    """Pipelining: one read at the broker, one callback for each, nothing left over."""

    async def scenario(broker: ScriptedBroker, connection: BrokerConnection) -> None:
        broker.answer = echo
        asker = Asker(connection)
        reads = broker.talks[0].read_count
        for number in range(500):
            asker.ask(number)
        assert connection.in_flight_count == 500
        assert connection.in_flight_bytes == connection.statistics().queued_bytes > 0
        await until(lambda: len(asker.outcomes) == 500)
        assert broker.talks[0].read_count == reads + 1
        for number, outcome in asker.outcomes:
            assert isinstance(outcome, Result)
            assert outcome.text == str(number)
        assert connection.in_flight_count == connection.in_flight_bytes == 0

    run(scenario)


def test_a_request_that_travels_alone_has_left_when_submit_returns() -> None:
    """It waits for no turn of the loop, and still overtakes nothing."""

    async def scenario(broker: ScriptedBroker, connection: BrokerConnection) -> None:
        broker.answer = echo
        asker = Asker(connection)
        asker.ask(1, is_alone=True)
        assert connection.in_flight_bytes > connection.statistics().queued_bytes == 0
        asker.ask(2)
        asker.ask(3, is_alone=True)
        assert connection.statistics().queued_bytes
        await until(lambda: len(asker.outcomes) == 3)
        assert [number for number, _outcome in asker.outcomes] == [1, 2, 3]

    run(scenario)


def test_replies_in_any_order_and_in_any_pieces_find_their_requests(
    rng: random.Random,
) -> None:
    """Pairing is by opaque alone, however the network cuts the bytes."""

    async def scenario(broker: ScriptedBroker, connection: BrokerConnection) -> None:
        broker.answer = silent
        asker = Asker(connection)
        for number in range(200):
            asker.ask(number)
        await until(lambda: len(broker.commands) == 201)
        asked = [c for c in broker.commands if isinstance(c, Stats)]
        rng.shuffle(asked)
        replies: list[Reply] = [
            Value(c.item.encode() * 50, c.opaque)
            if rng.random() < 0.5
            else Result(404, c.item.encode(), c.opaque)
            for c in asked
        ]
        data = b"".join(map(encode, replies))
        while data:
            size = rng.choice([1, 2, 7, 100, 3000])
            broker.talks[0].transport.write(data[:size])
            data = data[size:]
            await asyncio.sleep(0)
        await until(lambda: len(asker.outcomes) == 200)
        assert [n for n, _ in asker.outcomes] == [int(c.item) for c in asked]
        assert [reply for _, reply in asker.outcomes] == replies

    run(scenario)


def test_pieces_of_a_frame_are_sent_one_after_the_other() -> None:
    """A frame may be given as a list, so that bytes are joined once."""

    async def scenario(broker: ScriptedBroker, connection: BrokerConnection) -> None:
        asker = Asker(connection)
        opaque = connection.next_opaque()
        outcomes: list[object] = []
        connection.submit(
            [b"stats ", b"a", b" %d\r\n" % opaque], opaque, outcomes.append,
            deadline_s=soon(),
        )  # fmt: skip
        asker.ask(2)
        await until(lambda: asker.outcomes)
        assert outcomes == [Result(200, b"", opaque)]
        assert broker.commands[1] == Stats("a", opaque)

    run(scenario)


def test_a_missed_deadline_is_one_error_and_the_late_reply_is_dropped() -> None:
    """The outcome is unknown; what comes afterwards is counted and nothing else."""

    async def scenario(broker: ScriptedBroker, connection: BrokerConnection) -> None:
        broker.answer = silent
        asker = Asker(connection)
        asker.ask(1, seconds=60)
        asker.ask(2, seconds=0.01)
        asker.ask(3, seconds=0.02)
        await until(lambda: len(asker.outcomes) == 2)
        await until(lambda: len(broker.commands) == 4)
        assert [number for number, _ in asker.outcomes] == [2, 3]
        assert {type(outcome) for _, outcome in asker.outcomes} == {RequestTimeoutError}
        assert connection.in_flight_count == 1
        for command in broker.commands[1:]:
            assert isinstance(command, Stats)
            broker.talks[0].transport.write(encode(Result(200, b"", command.opaque)))
        await until(lambda: len(asker.outcomes) == 3)
        await until(lambda: connection.statistics().unknown_reply_count == 2)
        assert connection.statistics().timeout_count == 2
        assert connection.is_open
        assert connection.in_flight_bytes == 0

    run(scenario)


def test_a_lost_connection_fails_all_in_flight_in_their_order() -> None:
    """Sent requests have an unknown outcome, those not sent say so."""

    async def scenario(broker: ScriptedBroker, connection: BrokerConnection) -> None:
        broker.answer = silent
        asker = Asker(connection)
        reasons: list[str] = []
        connection.on_closed(reasons.append)
        for number in range(3):
            asker.ask(number)
        await until(lambda: len(broker.commands) == 4)
        broker.cut()
        await until(lambda: not connection.is_open)
        assert [number for number, _ in asker.outcomes] == [0, 1, 2]
        assert {type(outcome) for _, outcome in asker.outcomes} == {ConnectionLostError}
        assert len(reasons) == 1
        assert connection.in_flight_count == connection.in_flight_bytes == 0
        with pytest.raises(ClosedError):
            asker.ask(4)

    run(scenario)


def test_what_never_left_is_told_from_what_may_have_left() -> None:
    """Closing in the turn of the submit: no byte of it has left."""

    async def scenario(broker: ScriptedBroker, connection: BrokerConnection) -> None:
        broker.answer = silent
        asker = Asker(connection)
        asker.ask(1)
        await until(lambda: len(broker.commands) == 2)
        asker.ask(2)
        connection.close("enough")
        connection.close("twice")
        kinds = [(number, type(outcome)) for number, outcome in asker.outcomes]
        assert kinds == [(1, ConnectionLostError), (2, NotSentError)]
        assert "enough" in str(asker.outcomes[1][1])

    run(scenario)


def test_a_reply_that_came_before_the_end_counts() -> None:
    """A send that fails first does not turn an answer into an unknown outcome."""

    def serve_version(server: socket.socket) -> socket.socket:
        peer, _address = server.accept()
        peer.recv(100)
        peer.sendall(encode(Result(200, b"1.4.6.2", 1)))
        return peer

    async def main() -> None:
        with socket.create_server(("127.0.0.1", 0)) as server:
            address = BrokerAddress("127.0.0.1", server.getsockname()[1])
            serving = asyncio.to_thread(serve_version, server)
            opening = open_connection(
                address, clock=CLOCK, deadline_s=soon(), options=OPTIONS
            )
            peer, connection = await asyncio.gather(serving, opening)
        asker = Asker(connection)
        asker.ask(1)
        await until(lambda: not connection.statistics().queued_bytes)
        # All in one turn: the answer, a reset for what was not read, and a send.
        peer.sendall(encode(Result(200, b"", 2)))
        peer.close()
        asker.ask(2)
        await until(lambda: len(asker.outcomes) == 2)
        assert asker.outcomes[0] == (1, Result(200, b"", 2))
        assert type(asker.outcomes[1][1]) is NotSentError

    asyncio.run(main())


def test_a_frame_that_left_in_part_counts_as_sent() -> None:
    """A peer that stops reading: the frame it got half of is unknown."""

    async def scenario(broker: ScriptedBroker, connection: BrokerConnection) -> None:
        broker.talks[0].transport.pause_reading()
        kinds: list[type] = []
        big = b"x" * (32 << 20)
        for _ in range(2):
            opaque = connection.next_opaque()
            connection.submit(
                big, opaque, lambda outcome: kinds.append(type(outcome)),
                deadline_s=soon(),
            )  # fmt: skip
        await until(lambda: connection.statistics().queued_bytes < 2 * len(big))
        assert connection.statistics().queued_bytes > len(big)
        assert not connection.has_room
        connection.close("enough")
        assert kinds == [ConnectionLostError, NotSentError]

    run(scenario)


@pytest.mark.parametrize("in_flight", [0, 1])
def test_who_leaves_in_peace_resets_nothing(in_flight: int) -> None:
    """A reset is for what is in flight: Java brokers log it as an error of theirs."""

    async def scenario(broker: ScriptedBroker, connection: BrokerConnection) -> None:
        broker.answer = silent
        asker = Asker(connection)
        for number in range(in_flight):
            asker.ask(number)
        await until(lambda: len(broker.commands) == 1 + in_flight)
        connection.close("enough")
        connection.close("again")
        await until(lambda: broker.ends)
        resets = [isinstance(one, ConnectionResetError) for one in broker.ends]
        assert resets == [in_flight > 0]
        assert len(asker.outcomes) == in_flight

    run(scenario)


def test_bytes_that_are_no_reply_end_the_connection() -> None:
    """A peer that speaks something else is not believed."""

    async def scenario(broker: ScriptedBroker, connection: BrokerConnection) -> None:
        broker.answer = silent
        asker = Asker(connection)
        asker.ask(1)
        await until(lambda: len(broker.commands) == 2)
        broker.talks[0].transport.write(b"HTTP/1.1 400 Bad Request\r\n")
        await until(lambda: asker.outcomes)
        assert isinstance(asker.outcomes[0][1], ConnectionLostError)
        assert not connection.is_open

    run(scenario)


@pytest.mark.slow
def test_nobody_there_and_nobody_who_answers_are_no_broker() -> None:
    """Opening names address and reason, and keeps its deadline."""

    async def main() -> None:
        with (
            free_address() as address,
            pytest.raises(NoBrokerError, match=f"{address}: Connection refused"),
        ):
            await open_connection(
                address, clock=CLOCK, deadline_s=soon(), options=OPTIONS
            )
        async with ScriptedBroker() as broker:
            broker.answer = lambda _command: None
            with pytest.raises(NoBrokerError, match="no answer within"):
                await open_connection(
                    broker.address, clock=CLOCK, deadline_s=soon(0.2), options=OPTIONS
                )
            await until(lambda: not broker.talks)

    asyncio.run(main())


def test_a_cancelled_call_leaves_the_connection_as_it_is() -> None:
    """The reply has no waiter; the next one is paired all the same."""

    async def scenario(broker: ScriptedBroker, connection: BrokerConnection) -> None:
        broker.answer = silent
        command = Stats("x", connection.next_opaque())
        call = asyncio.ensure_future(connection.call(command, deadline_s=soon()))
        await until(lambda: len(broker.commands) == 2)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        broker.answer = echo
        broker.talks[0].transport.write(encode(Result(200, b"", command.opaque)))
        reply = await connection.call(
            Stats("y", connection.next_opaque()), deadline_s=soon()
        )
        assert isinstance(reply, Result)
        assert reply.text == "y"
        assert connection.statistics().unknown_reply_count == 0

    run(scenario)


def test_a_callback_that_fails_does_not_harm_the_others(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Each request's outcome is its own."""

    async def scenario(broker: ScriptedBroker, connection: BrokerConnection) -> None:
        def fail(_outcome: Any) -> None:
            raise ZeroDivisionError

        opaque = connection.next_opaque()
        frame = encode(Stats("x", opaque))
        connection.submit(frame, opaque, fail, deadline_s=soon())
        asker = Asker(connection)
        asker.ask(1)
        await until(lambda: asker.outcomes)
        assert connection.is_open

    run(scenario)
    assert "reply callback failed" in caplog.text


def test_a_callback_may_close_the_connection() -> None:
    """Closing between replies fails the rest, once each."""

    async def scenario(broker: ScriptedBroker, connection: BrokerConnection) -> None:
        broker.answer = silent
        opaque = connection.next_opaque()
        connection.submit(
            encode(Stats("x", opaque)), opaque, lambda _o: connection.close("done"),
            deadline_s=soon(),
        )  # fmt: skip
        asker = Asker(connection)
        asker.ask(1)
        await until(lambda: len(broker.commands) == 3)
        replies = b"".join(
            encode(Result(200, b"", c.opaque))
            for c in broker.commands[1:]
            if isinstance(c, Stats)
        )
        broker.talks[0].transport.write(replies)
        await until(lambda: asker.outcomes)
        assert len(asker.outcomes) == 1
        assert isinstance(asker.outcomes[0][1], ConnectionLostError)

    run(scenario)


def test_a_listener_that_was_taken_back_hears_nothing() -> None:
    """`on_closed` gives back what undoes it."""

    async def scenario(_broker: ScriptedBroker, connection: BrokerConnection) -> None:
        heard: list[str] = []
        cancel = connection.on_closed(heard.append)
        connection.on_closed(heard.append)
        cancel()
        cancel()
        connection.close("over")
        assert heard == ["over"]

    run(scenario)


I64 = 2**63
RECEIPTS = st.builds(
    b"%d %d %d".__mod__,
    st.tuples(st.integers(-I64, I64 - 1), st.integers(-1, 99), st.integers(0, I64 - 1)),
)
REPLIES = st.lists(
    st.one_of(
        st.builds(Result, st.just(200), RECEIPTS, st.integers(-(2**31), 2**31 - 1)),
        st.builds(
            Result,
            st.just(200),
            st.from_regex(rb"-?[0-9]{1,3} [0-9 ]{1,5} [0-9\r]{1,3}", fullmatch=True),
            st.integers(0, 9),
        ),
        st.builds(
            Result,
            st.integers(0, 999),
            st.binary(max_size=20),
            st.integers(-(2**31), 2**31 - 1),
        ),
        st.builds(Value, st.binary(max_size=20), st.integers(0, 2**31 - 1)),
    ),
    max_size=12,
)


def list_receipts(receipts: ReceiptColumns | None) -> list[Result]:
    """Return what was read column by column as the replies that it was read from."""
    return [] if receipts is None else receipts.replies()


def meaning_of(reply: object) -> object:
    """Return the outcome of a put, where a reply may be one's; else the reply."""
    assert isinstance(reply, Result | Value)
    try:
        return reply.opaque, parse_receipt(reply)
    except MetaqError:
        return reply


def read_all(data: bytes, cuts: list[int], *, is_hot: bool) -> list[object]:
    connection = Connection(Role.CLIENT, WireLimits())
    events: list[object] = []
    edges = sorted({0, len(data), *(cut % (len(data) + 1) for cut in cuts)})
    for start, end in itertools.pairwise(edges):
        connection.receive_data(data[start:end])
        while True:
            if is_hot and connection.is_between_frames:
                events += list_receipts(take_receipts(connection.buffer))
                events += take_results(connection.buffer)
            event = connection.next_event()
            if event is NEED_DATA:
                break
            events.append(event)
    return events


@given(REPLIES, st.lists(st.integers(0, 1000), max_size=6))
def test_the_hot_path_reads_what_the_general_path_reads(
    replies: list[Reply], cuts: list[int]
) -> None:
    """Both ways give the same replies, however the bytes are cut."""
    data = b"".join(map(encode, replies))
    hot = read_all(data, cuts, is_hot=True)
    assert list(map(meaning_of, hot)) == list(map(meaning_of, replies))
    assert read_all(data, cuts, is_hot=False) == replies


def test_scripted_talks_end_with_their_broker() -> None:
    """The tests' own peer leaves nothing open."""

    async def main() -> list[Talk]:
        async with ScriptedBroker() as broker, connected(broker):
            assert broker.talks
        return broker.talks

    assert asyncio.run(main()) == []
