"""`/metrics`: a broker's status in the text format of Prometheus.

There is no registry that outlives a request and no counter in here: each rendering
builds its families from one `BrokerStatus` and the table in `metric_table.py`, so
numbers of one answer belong together. The process's own figures (`process_...`) are
read from the system by the library.
"""

from collections.abc import Iterator
from typing import Final

from prometheus_client import (
    CONTENT_TYPE_LATEST,
    CollectorRegistry,
    ProcessCollector,
    generate_latest,
)
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from metaq.broker.metric_table import METRICS
from metaq.broker.status import BrokerStatus
from metaq.prometheus import HistogramSpec, histogram_family, metric_family

CONTENT_TYPE: Final = CONTENT_TYPE_LATEST
"""What an answer with metrics is called."""


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
        for spec in METRICS:
            family = (
                histogram_family(spec, list(spec.read(self._status)))
                if isinstance(spec, HistogramSpec)
                else metric_family(spec, spec.read(self._status))
            )
            if family.samples:
                yield family
