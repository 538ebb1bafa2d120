"""A client's counters as metrics of Prometheus.

    REGISTRY.register(ClientCollector(client))

A scrape takes one snapshot of each client and sends no request; there is no counter in
here and no thread, but for that of `serve_metrics`. Values with equal labels are added
up: the producers of all clients, the consumers of one group. What a producer or a
consumer counted stays in the sums of its client when it is closed; a series of one
partition leaves with its consumer. A client takes all of its numbers with it, which
Prometheus takes for a restart.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Final, Protocol

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from metaq.client.client_statistics import ClientStatistics
from metaq.errors import ClosedError, ConfigError
from metaq.prometheus import ExportedMetric, metrics_of

HOST: Final = "127.0.0.1"
"""Address that `serve_metrics` listens on: only this machine may ask."""
STOP_TIMEOUT_S: Final = 2.0

PARTITION_SERIES_MAX: Final = 1_000
"""Series of a metric with a label for partitions, the first ones by name; metrics of a
group have all of its partitions in them."""


METRICS: Final = metrics_of(ClientStatistics)


class Measured(Protocol):
    """An object that keeps counters."""

    def statistics(self) -> object:
        """Return a snapshot; raises ClosedError when there is none any more."""


class MeasuredClient(Protocol):
    """A client of either world."""

    def statistics(self) -> ClientStatistics:
        """Return a snapshot; raises ClosedError when the client is not running."""


class StatisticsCollector(Collector):
    """Statistics of objects of one kind, for a registry of Prometheus' library.

    Concurrency: any thread collects, several at once.
    """

    def __init__(
        self, metrics: Sequence[ExportedMetric], measured: Sequence[Measured]
    ) -> None:
        """Measure these.

        Args:
            metrics: of the class of their snapshots.
            measured: one or more; those that raise ClosedError have nothing to say.
        """
        self._metrics = metrics
        self._measured = measured

    def describe(self) -> Iterator[Metric]:
        """Yield every family without samples: a second collector is refused by name."""
        for metric in self._metrics:
            yield metric.family([])

    def collect(self) -> Iterator[Metric]:
        """Yield one family per metric that has a sample."""
        snapshots = [*self._snapshots()]
        for metric in self._metrics:
            samples = sorted(metric.samples(snapshots).items())
            if "partition" in metric.spec.labels:
                del samples[PARTITION_SERIES_MAX:]
            if samples:
                yield metric.family(samples)

    def _snapshots(self) -> Iterator[object]:
        for one in self._measured:
            try:
                yield one.statistics()
            except ClosedError:
                continue


class ClientCollector(StatisticsCollector):
    """Counters of clients, for a registry of Prometheus' library.

    A registry takes one of these: give it all clients of the process. Clients may be
    registered before they are started; those that are closed, or that another process
    made, have nothing to say.

    Concurrency: any thread collects, several at once.
    """

    def __init__(self, *clients: MeasuredClient) -> None:
        """Measure these.

        Args:
            clients: of either world, one or more; not closed.
        """
        super().__init__(METRICS, clients)


@contextmanager
def serve_metrics(*clients: MeasuredClient, port: int) -> Iterator[int]:
    """Answer scrapes of `http://127.0.0.1:<port>/metrics` inside the block.

    Args:
        clients: of either world; outlive the block.
        port: TCP port; 0 takes a free one.

    Yields:
        The port.

    Raises:
        ConfigError: the port cannot be had.
    """
    with serve_statistics(METRICS, clients, port=port) as found:
        yield found


@contextmanager
def serve_statistics(
    metrics: Sequence[ExportedMetric], measured: Sequence[Measured], *, port: int
) -> Iterator[int]:
    """Answer scrapes of any statistics, as `serve_metrics` does those of clients."""
    registry = CollectorRegistry()
    registry.register(StatisticsCollector(metrics, measured))
    try:
        server, thread = start_http_server(port, HOST, registry)
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"metrics port {port}: {reason}") from error
    try:
        yield server.server_port
    finally:
        # Returns when the thread has looked up; a scrape under way has its own.
        server.shutdown()
        server.server_close()
        thread.join(STOP_TIMEOUT_S)
