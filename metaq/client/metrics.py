"""A client's counters as metrics of Prometheus.

    REGISTRY.register(ClientCollector(client))

A scrape takes one snapshot of each client and sends no request; this module has no
counters, and no thread except that of `serve_metrics`. Values with equal labels are
summed: of the producers of all clients, of the consumers of one group. The counts of
closed producers and consumers stay in the sums of their client; series of partitions
end with their consumer. When a client is closed, its numbers are removed, which looks
like a restart to Prometheus.
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
"""Address that `serve_metrics` listens on: only this machine can connect."""
STOP_TIMEOUT_S: Final = 2.0

PARTITION_SERIES_MAX: Final = 1_000
"""Maximum number of series of a metric labeled by partition, the first ones by name;
metrics of a group include all of its partitions."""


METRICS: Final = metrics_of(ClientStatistics)


class Measured(Protocol):
    """An object that keeps counters."""

    def statistics(self) -> object:
        """Return a snapshot; raises ClosedError if the object is closed."""


class MeasuredClient(Protocol):
    """A sync or async client."""

    def statistics(self) -> ClientStatistics:
        """Return a snapshot; raises ClosedError if the client is not running."""


class StatisticsCollector(Collector):
    """Statistics of objects of one kind, for a registry of Prometheus' library.

    Concurrency: any number of threads may collect at once.
    """

    def __init__(
        self, metrics: Sequence[ExportedMetric], measured: Sequence[Measured]
    ) -> None:
        """Create a collector.

        Args:
            metrics: metrics of the class of their snapshots.
            measured: one or more objects; those that raise ClosedError are left out.
        """
        self._metrics = metrics
        self._measured = measured

    def describe(self) -> Iterator[Metric]:
        """Yield every family without samples, so that a second collector is refused."""
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

    A registry accepts only one, so pass all clients of the process. Clients may be
    registered before they are started; those that are closed, or of another process,
    are left out.

    Concurrency: any number of threads may collect at once.
    """

    def __init__(self, *clients: MeasuredClient) -> None:
        """Create a collector.

        Args:
            clients: one or more sync or async clients.
        """
        super().__init__(METRICS, clients)


@contextmanager
def serve_metrics(*clients: MeasuredClient, port: int) -> Iterator[int]:
    """Answer scrapes of `http://127.0.0.1:<port>/metrics` inside the block.

    Args:
        clients: sync or async clients, which must outlive the block.
        port: TCP port; 0 takes a free one.

    Yields:
        The port.

    Raises:
        ConfigError: the port cannot be used.
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
        # Returns when the thread has stopped serving; scrapes have their own threads.
        server.shutdown()
        server.server_close()
        thread.join(STOP_TIMEOUT_S)
