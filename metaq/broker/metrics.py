"""`/metrics`: a broker's status in the text format of Prometheus.

There is no registry that outlives a request and no counter in here: each rendering
builds its families from one `BrokerStatus` and what its fields declare, so numbers of
one answer belong together. The process's own figures (`process_...`) are read from the
system by the library.
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

from metaq.broker.health import SEVERITIES, Alarm, find_problems
from metaq.broker.status import BrokerStatus
from metaq.prometheus import ExportedMetric, Found, metrics_of
from metaq.stats import MetricKind, MetricSpec

CONTENT_TYPE: Final = CONTENT_TYPE_LATEST
"""Content type of an answer with metrics."""


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
