"""Probes and scrapers over HTTP."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from dataclasses import replace

import pytest
from prometheus_client import CONTENT_TYPE_LATEST

from metaq.broker.http import CONNECTION_AGE_S_MIN, CONNECTION_COUNT_MAX, HttpServer
from metaq.broker.status import BrokerStatus
from metaq.errors import ConfigError
from metaq.lifecycle import State
from metaq.testing.clock import ManualClock
from metaq.zk.registry import RegistrationState
from metaq.zk.session import SessionState
from tests.broker.figures import HEALTHY, registration, status

HOST = "127.0.0.1"


class Probe:
    """A server that is up, and what its broker looks like."""

    def __init__(self) -> None:
        self.broker: BrokerStatus = HEALTHY
        self.clock = ManualClock()
        self.server = self.new_server(0)

    def new_server(self, port: int) -> HttpServer:
        return HttpServer(
            HOST,
            port,
            lambda: self.broker,
            clock=self.clock,
            stop_timeout_s=30,
        )

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_connection(HOST, self.server.port)

    async def request(self, line: str) -> tuple[int, dict[str, str], bytes]:
        """Return status, headers in lower case, and body of one request."""
        reader, writer = await self.connect()
        writer.write(f"{line}\r\nHost: x\r\nConnection: close\r\n\r\n".encode())
        head, _, body = (await reader.read()).partition(b"\r\n\r\n")
        writer.close()
        first, *lines = head.decode().split("\r\n")
        headers = dict(line.lower().split(": ", 1) for line in lines)
        return int(first.split()[1]), headers, body

    async def get(self, path: str) -> tuple[int, dict[str, str], bytes]:
        return await self.request(f"GET {path} HTTP/1.1")


def with_server(body: Callable[[Probe], Awaitable[None]]) -> None:
    async def run() -> None:
        probe = Probe()
        await probe.server.start()
        try:
            await body(probe)
        finally:
            await probe.server.stop()

    asyncio.run(run())


def test_a_healthy_broker_answers_200() -> None:
    """The body is JSON that names the broker."""

    async def body(probe: Probe) -> None:
        code, headers, text = await probe.get("/health")
        assert code == 200
        assert headers["content-type"].startswith("application/json")
        assert json.loads(text)["status"] == "ok"
        assert json.loads(text)["broker_id"] == 3

    with_server(body)


@pytest.mark.parametrize(
    ("broker", "code", "verdict"),
    [
        (status(state=State.STOPPING), 503, "failing"),
        (status(state=State.FAILED), 503, "failing"),
        (status(registration=registration(RegistrationState.PENDING)), 200, "warning"),
        (
            status(
                state=State.STARTING,
                registration=registration(
                    RegistrationState.PENDING, SessionState.SUSPENDED
                ),
            ),
            200,
            "warning",
        ),
    ],
)
def test_only_a_failing_alarm_is_503(
    broker: BrokerStatus, code: int, verdict: str
) -> None:
    """A warning is told in the body, and the broker stays in rotation."""

    async def body(probe: Probe) -> None:
        probe.broker = broker
        got, _, text = await probe.get("/health")
        assert (got, json.loads(text)["status"]) == (code, verdict)
        assert json.loads(text)["problems"]

    with_server(body)


def test_metrics_are_those_of_the_moment() -> None:
    """Each request takes a fresh snapshot."""

    async def body(probe: Probe) -> None:
        code, headers, text = await probe.get("/metrics")
        assert (code, headers["content-type"]) == (200, CONTENT_TYPE_LATEST.lower())
        assert b"metaq_uptime_seconds 12.5\n" in text
        probe.broker = replace(HEALTHY, uptime_s=13.0)
        assert b"metaq_uptime_seconds 13.0\n" in (await probe.get("/metrics"))[2]

    with_server(body)


@pytest.mark.parametrize(
    ("line", "code"),
    [
        ("HEAD /health HTTP/1.1", 200),
        ("HEAD /metrics HTTP/1.1", 200),
        ("GET / HTTP/1.1", 404),
        ("GET /health/.. HTTP/1.1", 404),
        ("GET /metrics/../../etc/passwd HTTP/1.1", 404),
        ("POST /health HTTP/1.1", 405),
        ("DELETE /metrics HTTP/1.1", 405),
        ("nonsense", 400),
    ],
)
def test_other_requests_have_an_answer(line: str, code: int) -> None:
    """Nothing but two paths is there, and nothing but reading is allowed."""

    async def body(probe: Probe) -> None:
        got, _, text = await probe.request(line)
        assert got == code
        assert not (line.startswith("HEAD") and text)

    with_server(body)


MALFORMED = (
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n",
    b"hello\r\n\r\n",
    b"put test 0 5 0 1\r\nhello\r\n\r\n",
    b"GET /health HTTP/9.9\r\n\r\n",
    b"GET http://[ HTTP/1.1\r\nHost: x\r\n\r\n",
    b"GET / HTTP/1.1\r\nbad header\r\n\r\n",
    b"GET /health HTTP/1.1\r\nHost: x\r\nContent-Length: -1\r\n\r\n",
    b"GET /" + b"a" * 20_000 + b" HTTP/1.1\r\nHost: x\r\n\r\n",
)


def test_malformed_http_leaves_no_traceback(caplog: pytest.LogCaptureFixture) -> None:
    """It is answered with 400 and costs a line of the log at most."""
    caplog.set_level("DEBUG")

    async def body(probe: Probe) -> None:
        for data in MALFORMED:
            caplog.clear()
            reader, writer = await probe.connect()
            writer.write(data)
            assert (await reader.read()).split()[1] == b"400", data
            writer.close()
            records = [r for r in caplog.records if not r.name.startswith("asyncio")]
            assert not any(record.exc_info for record in records), data
            assert len(records) <= 1, data
        assert (await probe.get("/health"))[0] == 200

    with_server(body)


def test_a_bug_in_an_answer_is_logged_with_its_traceback(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The log is quiet about malformed requests alone."""

    async def body(probe: Probe) -> None:
        probe.broker = None  # type: ignore[assignment]  # describing it fails
        assert (await probe.get("/health"))[0] == 500

    with_server(body)
    assert any(record.exc_info for record in caplog.records)


def test_connections_are_bounded() -> None:
    """One more than the cap is closed at once, while none of them is old."""

    async def body(probe: Probe) -> None:
        held = [await probe.connect() for _ in range(CONNECTION_COUNT_MAX)]
        reader, writer = await probe.connect()
        assert await reader.read() == b""
        writer.close()
        for _, writer in held:
            writer.close()

    with_server(body)


def test_an_old_connection_makes_room() -> None:
    """Idle connections cannot keep a probe out for long."""

    async def body(probe: Probe) -> None:
        held = [await probe.connect() for _ in range(CONNECTION_COUNT_MAX)]
        # One too many: all before it have been let in when it is turned away.
        reader, writer = await probe.connect()
        assert await reader.read() == b""
        writer.close()
        probe.clock.advance_s(CONNECTION_AGE_S_MIN)
        assert (await probe.get("/health"))[0] == 200
        assert await held[0][0].read() == b""
        for _, writer in held:
            writer.close()

    with_server(body)


def test_closed_connections_do_not_count() -> None:
    """Many probes one after the other never fill the cap."""

    async def body(probe: Probe) -> None:
        for _ in range(CONNECTION_COUNT_MAX + 5):
            assert (await probe.get("/health"))[0] == 200

    with_server(body)


def test_a_port_that_is_taken_is_one_sentence() -> None:
    """The message names the two settings."""

    async def body(probe: Probe) -> None:
        second = probe.new_server(probe.server.port)
        with pytest.raises(ConfigError) as caught:
            await second.start()
        assert str(caught.value) == (
            "HTTP cannot be served on httpHost=127.0.0.1"
            f" httpPort={probe.server.port}: Address already in use"
        )
        assert (await probe.get("/health"))[0] == 200

    with_server(body)
