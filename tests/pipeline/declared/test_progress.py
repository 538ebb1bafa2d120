"""Progress that Spark reports, as the values and sums of a pipeline's run."""

from typing import Any

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from metaq.client.metrics import StatisticsCollector
from metaq.pipeline.declared.progress import (
    METRICS,
    BatchProgress,
    PipelineCounters,
    batch_of,
)

pytestmark = pytest.mark.spark


def report(*sources: dict[str, Any], written: int = -1) -> dict[str, Any]:
    return {
        "name": "spark_catalog.default.lines",
        "batchId": 7,
        "batchDuration": 1250,
        "sources": list(sources),
        "sink": {"numOutputRows": written},
    }


def topics(unread: dict[str, int] | None, rows: int = 3) -> dict[str, Any]:
    """Return a source of ours with so many unread bytes; None: its ends are unknown."""
    backlogs = {t: {"bytes": n, "records": None} for t, n in (unread or {}).items()}
    ends = {"/version": 1, "a": {"0-0": 40}, "/behind": backlogs}
    return {
        "endOffset": {"/version": 1, "a": {"0-0": 10}},
        "latestOffset": None if unread is None else ends,
        "numInputRows": rows,
    }


def test_a_batch_is_named_by_its_flow() -> None:
    """A target that reports none has no number, which is not 0."""
    assert batch_of(report(topics({}), written=2)) == BatchProgress(
        flow="lines",
        batch=7,
        row_in_count=3,
        row_out_count=2,
        duration_s=1.25,
        lag_bytes={},
    )
    assert batch_of(report()).row_out_count is None


@pytest.mark.parametrize(
    ("sources", "lag"),
    [
        ([topics({"a": 20, "b": 0})], {"a": 20, "b": 0}),
        # Two sources of one query.
        ([topics({"a": 5}), topics({"a": 1, "b": 1})], {"a": 6, "b": 1}),
        # Spark 4.1 does not ask for log ends; files have offsets of their own.
        ([topics(None)], {}),
        (
            [{"endOffset": {"logOffset": 0}, "latestOffset": None, "numInputRows": 1}],
            {},
        ),
    ],
)
def test_lag_is_told_by_topic(
    sources: list[dict[str, Any]], lag: dict[str, int]
) -> None:
    assert batch_of(report(*sources)).lag_bytes == lag


def test_sums_grow_and_the_newest_batch_is_shown() -> None:
    counters = PipelineCounters()
    for rows, written, lag in ((3, 1, 20), (4, None, 0)):
        counters.add(
            BatchProgress(
                flow="lines",
                batch=rows,
                row_in_count=rows,
                row_out_count=written,
                duration_s=rows / 2,
                lag_bytes={"logs": lag},
            )
        )
    counters.add_update()
    registry = CollectorRegistry()
    registry.register(StatisticsCollector(METRICS, [counters]))
    lines = generate_latest(registry).decode().splitlines()
    assert [line for line in lines if not line.startswith("#")] == [
        "metaq_pipeline_updates_total 1.0",
        'metaq_pipeline_batches_total{flow="lines"} 2.0',
        'metaq_pipeline_rows_in_total{flow="lines"} 7.0',
        'metaq_pipeline_rows_out_total{flow="lines"} 1.0',
        'metaq_pipeline_batch_seconds{flow="lines"} 2.0',
        'metaq_pipeline_lag_bytes{flow="lines",topic="logs"} 0.0',
    ]
