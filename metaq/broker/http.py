"""`GET /health` and `GET /metrics` on an optional HTTP port, loopback by default.

    /health    JSON; 200 while everything is served, 503 while an alarm is failing
    /metrics   the text format of Prometheus

Nothing can be changed through this port, and only the path of a request is read.
Connections are bounded: an old one is closed when there are too many. A slow answer is
rendered on a thread of its own, not on the event loop: a slow disk, which the metrics
may show, must not delay them.

No registry of metrics outlives a request, and no counter is kept here: each rendering
builds its families from one `BrokerStatus` and the declarations of its fields, so the
numbers of one answer belong together. The library reads the process's own figures
(`process_...`) from the system.

The app imports this module only when `httpPort` is set: aiohttp needs more memory than
the rest of the broker.
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
"""Probes and scrapers at the same time."""
CONNECTION_AGE_S_MIN: Final = 10.0
"""When there are too many, connections older than this are closed to make room."""
KEEP_ALIVE_S: Final = 30.0
"""Time for which a connection may be idle between two requests, seconds."""
REQUEST_S_MAX_AT_STOP: Final = 0.5
BODY_BYTES_MAX: Final = 1024
"""No request of ours has a body."""

_log = logging.getLogger(__name__)


class HttpServer(Service):
    """Serves probes and scrapers. Owner: the app; everything on its event loop."""

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
        # When each connection was opened; closed ones stay until a newcomer looks.
        self._opened: dict[web.RequestHandler, float] = {}
        self._fresh: set[web.RequestHandler] = set()

    async def on_start(self) -> None:
        """Bind and listen.

        Raises:
            ConfigError: the address or port cannot be had.
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
        """Return the protocol of a new connection, one that refuses when full.

        Connections are only checked when a new one comes: an idle one costs nothing.
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
        # The library lists a connection from the loop's next turn on.
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
        # The snapshot is taken here and rendered there: it is a value.
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
    """Closes at once: there are too many connections, and none is old."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Close the connection."""
        transport.close()


def render_metrics(status: BrokerStatus) -> bytes:
    """Return the text of all metrics.

    Args:
        status: the broker. Nothing else is touched but `/proc`, so this may run on any
            thread.
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
        """Return nothing: the library would otherwise collect once in vain."""
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
"""Every metric of ours, in the order of an answer: what is judged, then what fields
declare."""
