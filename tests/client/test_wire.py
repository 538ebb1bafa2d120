"""One blocking connection: pipelining, deadlines, and what breaks."""

import socket

import pytest

from metaq.client.errors import ConnectionLostError, UnexpectedReplyError
from metaq.client.publish import encode_batch
from metaq.client.replies import (
    Fetched,
    MovedTo,
    NothingThere,
    parse_get,
    parse_receipt,
)
from metaq.client.wire import IN_FLIGHT_COUNT_MAX, WireConnection, pump
from metaq.clock import SystemClock
from metaq.errors import (
    ClosedError,
    ForbiddenError,
    LocalProtocolError,
    NoBrokerError,
    RequestTimeoutError,
    ServerError,
)
from metaq.model import Offset
from metaq.protocol.commands import Get, Put, Reply, Result, Value, Version
from metaq.zk.znodes import BrokerAddress
from tests.client.memory_broker import JAVA, OURS, MemoryBroker

CLOCK = SystemClock()


def connect(broker: MemoryBroker) -> WireConnection:
    return WireConnection.open(broker.address, timeout_s=5, clock=CLOCK)


def test_a_connection_knows_what_the_broker_can_do() -> None:
    """The body of the version reply is read when the connection is opened."""
    with MemoryBroker() as broker, connect(broker) as connection:
        assert connection.capabilities == OURS
    with MemoryBroker(JAVA) as broker, connect(broker) as connection:
        assert not connection.capabilities.has_mput


def test_put_get_offset_and_stats_give_values() -> None:
    """Each command's reply becomes a value of its own."""
    with MemoryBroker() as broker, connect(broker) as connection:
        receipt = connection.put("t", 1, b"hello", timeout_s=5)
        assert (receipt.partition, receipt.offset) == (1, 0)
        batch = connection.mput(
            "t", 1, encode_batch([b"a", b""], 0), 2, producer="p", sequence=0,
            timeout_s=5,
        )  # fmt: skip
        assert batch.offset == 25
        outcome = connection.get("t", 1, Offset(0), max_bytes=25, timeout_s=5)
        assert isinstance(outcome, Fetched)
        assert outcome.data.endswith(b"hello")
        assert connection.log_end("t", 1, timeout_s=5) == 66
        assert connection.offset("nowhere", 0, 0, timeout_s=5) is None
        assert "broker_id 7" in connection.stats(timeout_s=5)


def test_replies_in_any_order_reach_their_requests() -> None:
    """Replies are paired by opaque, not by order."""
    ours, theirs = socket.socketpair()
    with theirs, WireConnection(ours, BrokerAddress("h", 1), CLOCK) as connection:
        got: dict[str, Reply] = {}
        first, second = connection.next_opaque(), connection.next_opaque()
        connection.submit(Version(first), first, lambda r: got.update(first=r))
        connection.submit(Version(second), second, lambda r: got.update(second=r))
        theirs.sendall(b"result 200 1 %d\r\nBresult 200 1 %d\r\nA" % (second, first))
        while len(got) < 2:
            assert pump([connection], deadline_s=CLOCK.monotonic_s() + 5, clock=CLOCK)
        assert got == {"first": Result(200, b"A", 1), "second": Result(200, b"B", 2)}
        assert connection.in_flight_count == 0


def test_an_answer_that_does_not_come_leaves_the_outcome_unknown() -> None:
    """A put without an answer raises within its time, and says what is not known."""
    with MemoryBroker() as broker, connect(broker) as connection:
        broker.stay_silent = lambda command: isinstance(command, Put)
        with pytest.raises(RequestTimeoutError, match="outcome unknown"):
            connection.put("t", 0, b"x", timeout_s=0.05)


def test_a_late_answer_disturbs_nobody() -> None:
    """The answer to a request that was given up is dropped."""
    ours, theirs = socket.socketpair()
    with theirs, WireConnection(ours, BrokerAddress("h", 1), CLOCK) as connection:
        with pytest.raises(RequestTimeoutError):
            connection.version(timeout_s=0.01)
        theirs.sendall(b"result 200 3 1\r\noldresult 200 3 2\r\nnew")
        assert connection.version(timeout_s=5).version == "new"


def test_a_broken_connection_leaves_the_outcome_unknown() -> None:
    """A broker that hangs up raises at once; the connection cannot be used again."""
    with MemoryBroker() as broker, connect(broker) as connection:
        broker.hang_up = lambda command: isinstance(command, Put)
        with pytest.raises(ConnectionLostError, match="outcome of 1 request"):
            connection.put("t", 0, b"x", timeout_s=5)
        assert not connection.is_open
        with pytest.raises(ClosedError):
            connection.version(timeout_s=5)


def test_bytes_that_are_no_reply_break_the_connection() -> None:
    """A peer that speaks something else is not believed."""
    ours, theirs = socket.socketpair()
    with theirs, WireConnection(ours, BrokerAddress("h", 1), CLOCK) as connection:
        theirs.sendall(b"HTTP/1.1 400 Bad Request\r\n")
        with pytest.raises(ConnectionLostError):
            connection.version(timeout_s=5)


def test_nobody_there_is_said_at_once() -> None:
    """A refused connection names the address."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        address = BrokerAddress("127.0.0.1", probe.getsockname()[1])
    with pytest.raises(NoBrokerError, match=f"{address}: Connection refused"):
        WireConnection.open(address, timeout_s=5, clock=CLOCK)


def test_a_broker_that_accepts_and_says_nothing_is_no_broker() -> None:
    """Opening keeps its time-out when the peer is silent."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = BrokerAddress("127.0.0.1", silent.getsockname()[1])
        with pytest.raises(NoBrokerError, match="does not answer"):
            WireConnection.open(address, timeout_s=0.05, clock=CLOCK)


def test_in_flight_requests_are_bounded() -> None:
    """Nobody can queue without end on a connection whose broker is stuck."""
    ours, theirs = socket.socketpair()
    with theirs, WireConnection(ours, BrokerAddress("h", 1), CLOCK) as connection:
        for _ in range(IN_FLIGHT_COUNT_MAX):
            opaque = connection.next_opaque()
            connection.submit(Version(opaque), opaque, lambda _reply: None)
        assert not connection.has_room
        with pytest.raises(LocalProtocolError, match="in flight"):
            connection.submit(Version(0), 0, lambda _reply: None)


def test_a_large_request_and_a_large_reply_pass_each_other() -> None:
    """Writing never waits for a peer that itself waits to be read."""
    with MemoryBroker() as broker, connect(broker) as connection:
        payload = bytes(1 << 20)
        replies: list[Reply] = []
        for _ in range(8):
            opaque = connection.next_opaque()
            put = Put("t", 0, payload, 0, -1, opaque)
            connection.submit(put, opaque, replies.append)
            opaque = connection.next_opaque()
            get = Get("t", "g", 0, 0, 1 << 20, opaque)
            connection.submit(get, opaque, replies.append)
        while len(replies) < 16:
            assert pump([connection], deadline_s=CLOCK.monotonic_s() + 5, clock=CLOCK)


@pytest.mark.parametrize(
    ("reply", "outcome"),
    [
        (Value(b"x", 1), Fetched(b"x")),
        (Value(b"", 1), NothingThere()),
        (Result(404, b"Could not find message at position 5", 1), NothingThere()),
        (Result(301, b"100", 1), MovedTo(Offset(100))),
    ],
)
def test_answers_to_a_get(reply: Reply, outcome: object) -> None:
    """The answers that a reader goes on with are values."""
    assert parse_get(reply) == outcome


@pytest.mark.parametrize(
    ("reply", "error", "text"),
    [
        (Result(403, b"closed", 1), ForbiddenError, "closed"),
        (Result(500, b"", 1), ServerError, "status 500"),
        (Result(200, b"odd", 1), UnexpectedReplyError, "odd"),
        (Result(301, b"here", 1), UnexpectedReplyError, "here"),
        (Result(777, b"odd", 1), UnexpectedReplyError, "777"),
    ],
)
def test_refusals_of_a_get(reply: Reply, error: type[Exception], text: str) -> None:
    """Every other answer is an error that carries the broker's text."""
    with pytest.raises(error, match=text):
        parse_get(reply)


@pytest.mark.parametrize(
    "reply", [Result(200, b"1 2", 1), Result(200, b"a b c", 1), Value(b"", 1)]
)
def test_a_200_that_is_no_receipt_is_not_believed(reply: Reply) -> None:
    """A put counts as stored only with id, partition and offset."""
    with pytest.raises(UnexpectedReplyError):
        parse_receipt(reply)
