"""One connection to a ZooKeeper server, byte by byte; all but one without a socket."""

import asyncio
import itertools
import socket
import struct
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kazoo import exceptions as kz
from kazoo.protocol import serialization as jute

from metaq.testing.clock import ManualClock
from metaq.zk._connection import (
    FRAME_BYTES_MAX,
    ServerConnection,
    ZooKeeperSession,
    connect,
)
from tests.zk.scripted_server import NO_NODE, PASSWORD, answer, event, frame, greeting

LOOPBACK = "127.0.0.1"
ANSWERED = ZooKeeperSession(30_000, 0x1234, PASSWORD, zxid=9)
ASK = jute.Sync("/")


class Wire(asyncio.Transport):
    """The client's end of a socket."""

    def __init__(self) -> None:
        super().__init__()
        self.sent: list[bytes] = []
        self.is_aborted = False

    def write(self, data: Any) -> None:
        self.sent.append(bytes(data))

    def abort(self) -> None:
        self.is_aborted = True


class Case:
    """A connection that has greeted, unless it is not to."""

    def __init__(self, *, is_greeted: bool = True) -> None:
        self.wire, self.events = Wire(), list[str]()
        asked = ZooKeeperSession(10_000, zxid=5)
        self.one = ServerConnection(asked, ManualClock(), self.events.append)
        self.one.connection_made(self.wire)
        if is_greeted:
            self.one.data_received(frame(greeting(30_000, 0x1234)))
        self.wire.sent.clear()

    def reason(self) -> str:
        """Return why the connection has ended; it has to."""
        assert self.wire.is_aborted
        return self.one.ended.result()


def in_loop(case: Any) -> None:
    async def run() -> None:
        await case()

    asyncio.run(run())


@pytest.mark.parametrize("host", [LOOPBACK, "a.name"])
def test_an_attempt_that_is_given_up_leaves_no_socket_open(host: str) -> None:
    """Whichever turn of the loop it is in: an open one fails the test by a warning."""

    async def case() -> None:
        asked, clock = ZooKeeperSession(10_000), ManualClock()
        # Nothing is accepted: the kernel connects.
        with socket.create_server((LOOPBACK, 0), backlog=32) as server:
            address = server.getsockname()

            async def resolve(*_args: object, **_named: object) -> list[Any]:
                return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", address)] * 2

            loop: Any = asyncio.get_running_loop()
            loop.getaddrinfo = resolve
            for turns in range(16):
                attempt = asyncio.create_task(
                    connect(host, address[1], asked, clock=clock, on_event=print)
                )
                for _ in range(turns):
                    await asyncio.sleep(0)
                attempt.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await attempt

    in_loop(case)


def test_a_client_greets_with_the_session_it_had() -> None:
    async def case() -> None:
        wire = Wire()
        one = ServerConnection(
            ZooKeeperSession(10_000, -2, b"secret", 77),
            ManualClock(),
            lambda _path: None,
        )
        one.connection_made(wire)
        body = struct.pack(">iqiqi", 0, 77, 10_000, -2, 6) + b"secret" + b"\0"
        assert wire.sent == [frame(body)]

    in_loop(case)


@given(cuts=st.lists(st.integers(1, 90), max_size=8))
def test_frames_come_in_any_pieces(cuts: list[int]) -> None:
    """The greeting; then two answers and an event between them."""

    async def case() -> None:
        here = Case(is_greeted=False)

        def feed(*bodies: bytes) -> None:
            data = b"".join(map(frame, bodies))
            places = sorted({0, len(data), *(cut for cut in cuts if cut < len(data))})
            for begin, end in itertools.pairwise(places):
                here.one.data_received(data[begin:end])

        feed(greeting(30_000, 0x1234))
        assert here.one.greeted.done()
        first, second = here.one.ask(jute.Exists("/n", None)), here.one.ask(ASK)
        answered = answer(2, zxid=9, fields=struct.pack(">i", 3) + b"/up")
        feed(answer(1, zxid=8, error=NO_NODE), event("/a"), event(""), answered)
        assert (first.result(), second.result()) == (None, "/up")
        assert here.events == ["/a"]
        assert here.one.session == ANSWERED

    in_loop(case)


def test_requests_are_numbered_and_answered_in_their_order() -> None:
    async def case() -> None:
        here = Case()
        first, second = here.one.ask(jute.Sync("/a")), here.one.ask(jute.Sync("/b"))
        assert [struct.unpack_from(">iii", sent)[1:] for sent in here.wire.sent] == [
            (1, jute.Sync.type),
            (2, jute.Sync.type),
        ]
        first.cancel()  # its answer still comes
        here.one.data_received(frame(answer(1, fields=struct.pack(">i", 1) + b"a")))
        here.one.data_received(frame(answer(2, fields=struct.pack(">i", 1) + b"b")))
        assert second.result() == "b"

    in_loop(case)


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (NO_NODE, kz.NoNodeError),
        (-110, kz.NodeExistsError),
        (-9999, kz.ZookeeperError),
    ],
)
def test_an_error_is_kazoo_s(code: int, kind: type[Exception]) -> None:
    """Also one that it does not know: the connection goes on."""

    async def case() -> None:
        here = Case()
        asked = here.one.ask(jute.GetData("/a", None))
        here.one.data_received(frame(answer(1, error=code)))
        assert type(asked.exception()) is kind
        assert not here.one.ended.done()

    in_loop(case)


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (frame(answer(2)), "expected answer 1, got 2"),
        (frame(answer(1, fields=b"\0\0\0\x09a")), "an answer cannot be read"),
        (frame(b"short"), "an answer cannot be read"),
        (b"HTTP/1.1 400 Bad", f"expected 0 to {FRAME_BYTES_MAX}, got {0x48545450}"),
        (b"\xff\xff\xff\xff", f"expected 0 to {FRAME_BYTES_MAX}, got -1"),
    ],
)
def test_a_server_that_cannot_be_understood_is_left(data: bytes, reason: str) -> None:
    """Its requests are in doubt; none waits for ever, and none is taken for another."""

    async def case() -> None:
        here = Case()
        asked = here.one.ask(jute.GetData("/a", None))
        here.one.data_received(data)
        assert reason in here.reason()
        assert isinstance(asked.exception(), kz.ConnectionLoss)

    in_loop(case)


def test_an_answer_that_nobody_waits_for_ends_the_connection() -> None:
    async def case() -> None:
        here = Case()
        here.one.data_received(frame(answer(1)))
        assert "cannot be read" in here.reason()

    in_loop(case)


@pytest.mark.parametrize("error", [None, ConnectionResetError("reset")])
def test_the_end_of_a_connection_ends_its_requests(error: Exception | None) -> None:
    async def case() -> None:
        here = Case()
        asked = here.one.ask(ASK)
        here.one.connection_lost(error)
        assert here.one.ended.result() == ("reset" if error else "closed by the server")
        late = here.one.ask(ASK)
        assert isinstance(asked.exception(), kz.ConnectionLoss)
        assert isinstance(late.exception(), kz.ConnectionLoss)
        assert len(here.wire.sent) == 1

    in_loop(case)


def test_a_request_that_cannot_be_encoded_leaves_the_others_alone() -> None:
    """Nothing was sent, so no answer of another one is taken for its own."""

    async def case() -> None:
        here = Case()
        with pytest.raises(UnicodeEncodeError):
            here.one.ask(jute.Sync("/\udcff"))
        good = here.one.ask(ASK)
        here.one.data_received(frame(answer(1, fields=struct.pack(">i", 1) + b"a")))
        assert good.result() == "a"

    in_loop(case)


def test_the_last_transaction_is_remembered_for_the_next_greeting() -> None:
    async def case() -> None:
        here = Case()
        for number, zxid in ((1, 9), (2, -1), (3, 0)):
            here.one.ask(jute.Exists("/", None))
            here.one.data_received(frame(answer(number, zxid=zxid, error=NO_NODE)))
        assert here.one.session == ANSWERED

    in_loop(case)
