"""`GET /health` and `GET /metrics` on an optional HTTP port, loopback by default.

    /health    JSON; 200 while everything is served, 503 while an alarm is failing
    /metrics   the text format of Prometheus

This port is read-only, and only the path of a request is used. The number of
connections is bounded: at the bound, an old one is closed for a new one. Metrics are
rendered on a separate thread, so that a large answer does not delay the event loop.

Metrics are not kept here: each request builds its metric families from one
`BrokerStatus` and the declarations of its fields, so that all numbers of an answer are
of one moment. The library reads the figures of the process (`process_...`) from the
system.

The app imports this module only if `httpPort` is set, because aiohttp needs more memory
than the rest of the broker.
"""

import asyncio
import logging
import os
from collections.abc import Callable, Iterator
from functools import partial
from typing import Final

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError
from prometheus_client import (
    CONTENT_TYPE_LATEST,
    CollectorRegistry,
    ProcessCollector,
    generate_latest,
)
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from metaq.broker.health import (
    SEVERITIES,
    Alarm,
    describe_health,
    find_problems,
    is_failing,
)
from metaq.broker.status import BrokerStatus
from metaq.clock import Clock
from metaq.errors import ConfigError
from metaq.fs.helper_threads import HelperThreads
from metaq.lifecycle import Service
from metaq.prometheus import ExportedMetric, Found, metrics_of
from metaq.stats import MetricKind, MetricSpec

CONNECTION_COUNT_MAX: Final = 32
"""Maximum number of open connections."""
CONNECTION_AGE_S_MIN: Final = 10.0
"""Age from which a connection may be closed for a new one, in seconds."""
KEEP_ALIVE_S: Final = 30.0
"""Maximum idle time of a connection between two requests, in seconds."""
REQUEST_S_MAX_AT_STOP: Final = 0.5
BODY_BYTES_MAX: Final = 1024
"""Maximum size of a request's body; no supported request has one."""

_log = logging.getLogger(__name__)


class HttpServer(Service):
    """The HTTP server. Owned by the app; used on its event loop."""

    def __init__(
        self,
        host: str,
        port: int,
        status: Callable[[], BrokerStatus],
        *,
        clock: Clock,
        stop_timeout_s: float,
    ) -> None:
        """Prepare a server; port 0: any free one."""
        super().__init__("http", stop_timeout_s=stop_timeout_s)
        self._host = host
        self.port = port
        self._status = status
        self._clock = clock
        self._renderer = HelperThreads(1, "metaq-http")
        # Time at which each connection was opened; closed ones are removed by `_admit`.
        self._opened: dict[web.RequestHandler, float] = {}
        self._fresh: set[web.RequestHandler] = set()

    async def on_start(self) -> None:
        """Bind and listen.

        Raises:
            ConfigError: the address or port cannot be used.
        """
        self._renderer.begin()
        stop = partial(self._renderer.end, cancel_futures=True)
        self.on_way_down("renderer", stop)
        app = web.Application(client_max_size=BODY_BYTES_MAX)
        app.router.add_get("/health", self._on_health)
        app.router.add_get("/metrics", self._on_metrics)
        runner = web.AppRunner(
            app,
            access_log=None,
            logger=_request_log,
            handle_signals=False,
            keepalive_timeout=KEEP_ALIVE_S,
            shutdown_timeout=REQUEST_S_MAX_AT_STOP,
        )
        await runner.setup()
        self.on_way_down("handlers", runner.cleanup)
        server = runner.server
        assert server is not None, "a runner that is set up has its server"

        def new_connection() -> asyncio.BaseProtocol:
            return self._admit(server)

        loop = asyncio.get_running_loop()
        try:
            listening = await loop.create_server(
                new_connection, self._host, self.port, backlog=CONNECTION_COUNT_MAX
            )
        except OSError as error:
            # asyncio's own text names the address again.
            number = error.errno or 0
            reason = os.strerror(number) if number > 0 else error.strerror or error
            raise ConfigError(
                f"HTTP cannot be served on httpHost={self._host}"
                f" httpPort={self.port}: {reason}"
            ) from error

        async def close() -> None:
            listening.close()

        self.on_way_down("port", close)
        self.port = listening.sockets[0].getsockname()[1]
        _log.info("http listening: host=%s port=%d", self._host, self.port)

    # -- connections

    def _admit(self, server: web.Server) -> asyncio.BaseProtocol:
        """Return the protocol of a new connection; at the bound, one that refuses.

        Ages are checked only here, so that open connections cost nothing.
        """
        now_s = self._clock.monotonic_s()
        is_open = {*server.connections, *self._fresh}
        self._opened = {
            protocol: opened_s
            for protocol, opened_s in self._opened.items()
            if protocol in is_open
        }
        if len(self._opened) >= CONNECTION_COUNT_MAX:
            oldest, opened_s = next(iter(self._opened.items()))
            if now_s - opened_s < CONNECTION_AGE_S_MIN:
                return _Refusal()
            del self._opened[oldest]
            oldest.force_close()
        protocol = server()
        self._opened[protocol] = now_s
        # The library lists the connection only from the next turn of the loop on.
        self._fresh.add(protocol)
        loop = asyncio.get_running_loop()
        loop.call_soon(loop.call_soon, self._fresh.discard, protocol)
        return protocol

    # -- requests

    async def _on_health(self, _: web.Request) -> web.Response:
        status = self._status()
        failing = is_failing(find_problems(status))
        return web.json_response(
            describe_health(status), status=503 if failing else 200
        )

    async def _on_metrics(self, _: web.Request) -> web.Response:
        # The snapshot is immutable, so the thread may render it.
        loop = asyncio.get_running_loop()
        body = await loop.run_in_executor(
            self._renderer, render_metrics, self._status()
        )
        return web.Response(body=body, headers={"Content-Type": CONTENT_TYPE_LATEST})


def _is_no_malformed_request(record: logging.LogRecord) -> bool:
    """Log a malformed request in one line; the library would add a traceback."""
    error = record.exc_info[1] if record.exc_info else None
    if not isinstance(error, HttpProcessingError):
        return True
    _log.debug("malformed http request: error=%.200r", error.message)
    return False


_request_log = logging.getLogger(f"{__name__}.requests")
_request_log.addFilter(_is_no_malformed_request)


class _Refusal(asyncio.Protocol):
    """Closes a connection at once, because there are too many and none is old."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Close the connection."""
        transport.close()


def render_metrics(status: BrokerStatus) -> bytes:
    """Return the text of all metrics.

    Args:
        status: snapshot of the broker. Only this and `/proc` are read, so the call may
            run on any thread.
    """
    registry = CollectorRegistry()
    registry.register(_StatusCollector(status))
    ProcessCollector(registry=registry)
    return generate_latest(registry)


class _StatusCollector(Collector):
    """Turns one snapshot into the library's families."""

    def __init__(self, status: BrokerStatus) -> None:
        self._status = status

    def describe(self) -> list[Metric]:
        """Return nothing; otherwise the library would call `collect` once more."""
        return []

    def collect(self) -> Iterator[Metric]:
        """Yield one family per metric that has a sample."""
        for metric in METRICS:
            samples = metric.samples([self._status])
            if samples:
                yield metric.family(samples.items())


def _read_build(status: BrokerStatus) -> Found:
    yield (status.version, str(status.broker_id)), 1


def _read_alarms(status: BrokerStatus) -> Found:
    raised = {problem.alarm for problem in find_problems(status)}
    for alarm in Alarm:
        yield (alarm.value, SEVERITIES[alarm].value), alarm in raised


METRICS: Final = (
    ExportedMetric(
        MetricSpec(
            MetricKind.GAUGE,
            "metaq_build_info",
            "Always 1; the labels say which software and which broker this is.",
            ("version", "broker_id"),
        ),
        (_read_build,),
    ),
    ExportedMetric(
        MetricSpec(
            MetricKind.GAUGE,
            "metaq_alarm",
            "1 while something is wrong, 0 otherwise.",
            ("alarm", "severity"),
        ),
        (_read_alarms,),
    ),
    *metrics_of(BrokerStatus),
)
"""All metrics of the broker, in the order of an answer: build and alarms, then those
declared by fields."""
