"""Families of Prometheus from declared fields of snapshots."""

from collections.abc import Mapping
from dataclasses import dataclass

import pytest
from prometheus_client.core import Metric

from metaq.prometheus import ExportedMetric, metrics_of
from metaq.stats import Histogram, HistogramSnapshot, counter, gauge, histogram, part


@dataclass(frozen=True, slots=True, kw_only=True)
class Log:
    """A snapshot of one log."""

    name: str = ""
    put_count: int = counter("puts_total", "Puts.")
    size_bytes: int = gauge("size_bytes", "Size.")
    delay: Mapping[str, float | None] = gauge(
        "delay_seconds",
        "Delay.",
        default=dict,
        labels=("kind",),
        read=lambda all_: {k: v for k, v in all_.items() if v is not None},
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Broker:
    """A snapshot of all logs."""

    latency: HistogramSnapshot = histogram("latency_seconds", "Latency.")
    logs: tuple[Log, ...] = part(
        default=(), labels=("log",), label=lambda log: (log.name,), count_max=2
    )
    peak_count: int = gauge("peak_count", "Most at a time.", combine=max)


def latency(*samples: float) -> HistogramSnapshot:
    seen = Histogram((1.0, 2.0))
    for sample in samples:
        seen.record(sample)
    return seen.snapshot()


def family(name: str, *snapshots: object) -> Metric:
    (metric,) = (m for m in metrics_of(Broker) if m.spec.name == name)
    return metric.family(metric.samples(snapshots).items())


def values(name: str, *snapshots: object) -> dict[str, float]:
    """Return the samples of a family by their labels."""
    return {
        ",".join(s.labels.values()): s.value for s in family(name, *snapshots).samples
    }


def test_parts_have_their_labels_before_those_of_the_metric() -> None:
    """A mapping is one sample for each of its keys."""
    log = Log(name="a", delay={"sync": 1.5, "read": None})
    found = family("delay_seconds", Broker(latency=latency(), logs=(log,)))
    assert [(s.labels, s.value) for s in found.samples] == [
        ({"log": "a", "kind": "sync"}, 1.5)
    ]


def test_only_the_first_parts_are_exported() -> None:
    """A broker with many logs keeps its page short."""
    logs = tuple(Log(name=name, size_bytes=7) for name in "abc")
    found = values("size_bytes", Broker(latency=latency(), logs=logs))
    assert found == {"a": 7.0, "b": 7.0}


def test_samples_of_several_snapshots_are_combined() -> None:
    """Sums, unless the declaration has another way."""
    snapshots = [
        Broker(latency=latency(), logs=(Log(name="a", put_count=n),), peak_count=n)
        for n in (3, 5, 4)
    ]
    assert values("puts_total", *snapshots) == {"a": 12.0}
    assert values("peak_count", *snapshots) == {"": 5.0}


def test_of_what_is_closed_only_sums_are_exported() -> None:
    """A gauge of it would say something of now."""

    @dataclass(frozen=True, slots=True, kw_only=True)
    class Closed:
        gone: Log | None = part(default=None, is_closed=True)

    assert [m.spec.name for m in metrics_of(Closed)] == ["puts_total"]


def test_a_histogram_is_cumulated_and_merged() -> None:
    """Each bucket of Prometheus holds those below it."""
    found = family(
        "latency_seconds",
        Broker(latency=latency(0.5, 1.5)),
        Broker(latency=latency(5.0)),
    )
    buckets = [s.value for s in found.samples if s.name.endswith("_bucket")]
    assert buckets == [1.0, 2.0, 3.0]
    assert [s.value for s in found.samples if s.name.endswith("_sum")] == [7.0]


def test_a_histogram_without_a_snapshot_has_no_samples() -> None:
    """The family is there with its sentence."""
    found = family("latency_seconds")
    assert (found.type, found.documentation, found.samples) == (
        "histogram",
        "Latency.",
        [],
    )


def test_labels_of_any_bytes_are_printable() -> None:
    """The name of a directory need not be UTF-8."""
    log = Log(name="a\udcff", put_count=1)
    assert values("puts_total", Broker(latency=latency(), logs=(log,))) == {
        "a\\udcff": 1.0
    }


def test_a_name_is_declared_with_the_same_labels_everywhere() -> None:
    """One family cannot have two sets of labels."""

    @dataclass(frozen=True, slots=True, kw_only=True)
    class Twice:
        one: int = counter("puts_total", "Puts.")
        logs: tuple[Log, ...] = part(default=(), labels=("log",))

    with pytest.raises(AssertionError, match="puts_total"):
        metrics_of(Twice)


def test_sources_of_one_name_are_one_metric() -> None:
    """In the order of fields."""

    @dataclass(frozen=True, slots=True, kw_only=True)
    class Both:
        now: Log | None = part(default=None)
        gone: Log | None = part(default=None, is_closed=True)

    found: ExportedMetric = metrics_of(Both)[0]
    assert [m.spec.name for m in metrics_of(Both)].count("puts_total") == 1
    both = Both(now=Log(put_count=2), gone=Log(put_count=3))
    assert found.samples([both, Both()]) == {(): 5}
