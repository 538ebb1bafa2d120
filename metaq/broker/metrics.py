"""`/metrics`: a broker's status in the text format of Prometheus.

There is no registry that outlives a request and no counter in here: each rendering
builds its families from one `BrokerStatus` and the table in `metric_table.py`, so
numbers of one answer belong together. The process's own figures (`process_...`) are
read from the system by the library.
"""

from collections.abc import Iterator
from itertools import accumulate
from typing import Final

from prometheus_client import (
    CONTENT_TYPE_LATEST,
    CollectorRegistry,
    ProcessCollector,
    generate_latest,
)
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from metaq.broker.metric_table import METRICS, HistogramSpec, MetricSpec
from metaq.broker.status import BrokerStatus

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
                self._histogram(spec)
                if isinstance(spec, HistogramSpec)
                else self._family(spec)
            )
            if family.samples:
                yield family

    def _family(self, spec: MetricSpec) -> Metric:
        family = (
            CounterMetricFamily(spec.name, spec.help, labels=spec.labels)
            if spec.kind == "counter"
            else GaugeMetricFamily(spec.name, spec.help, labels=spec.labels)
        )
        for labels, value in spec.read(self._status):
            family.add_metric([_printable(label) for label in labels], float(value))
        return family

    def _histogram(self, spec: HistogramSpec) -> Metric:
        family = HistogramMetricFamily(spec.name, spec.help)
        figures = spec.read(self._status)
        bounds = [*map(floatToGoString, figures.bounds), "+Inf"]
        counts = accumulate(figures.counts)
        family.add_metric([], list(zip(bounds, counts, strict=True)), figures.total)
        return family


def _printable(text: str) -> str:
    """Return a label that UTF-8 can hold, whatever bytes a path is made of."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")
