"""Progress of a declared pipeline: a value for each micro-batch, sums for metrics.

Everything is taken from the progress that Spark reports of a query, or from its
checkpoints (`flows_of`); no broker is contacted.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from metaq.model import Millis
from metaq.prometheus import metrics_of
from metaq.spark.offsets import LAG_KEY
from metaq.stats import counter, gauge, part


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchProgress:
    """One micro-batch of a flow."""

    flow: str
    """Name of the flow, without catalog and database."""
    batch: int
    """Number of the micro-batch in its checkpoint."""
    row_in_count: int
    row_out_count: int | None
    """Rows that it wrote; None if the target does not report them, as file tables."""
    duration_s: float
    lag_bytes: Mapping[str, int]
    """Topic → unread bytes of its logs, for each topic read by the flow."""


def batch_of(report: Mapping[str, Any]) -> BatchProgress:
    """Return the progress of a micro-batch.

    Args:
        report: `StreamingQueryProgress.json`, parsed.
    """
    lag_bytes: dict[str, int] = {}
    for source in report["sources"]:
        for topic, size_bytes in lag_of(source).items():
            lag_bytes[topic] = lag_bytes.get(topic, 0) + size_bytes
    written = report["sink"].get("numOutputRows", -1)
    return BatchProgress(
        flow=str(report["name"]).rpartition(".")[2],
        batch=report["batchId"],
        row_in_count=sum(source["numInputRows"] for source in report["sources"]),
        row_out_count=None if written < 0 else written,
        duration_s=report["batchDuration"] / 1000,
        lag_bytes=lag_bytes,
    )


def lag_of(source: Mapping[str, Any]) -> dict[str, int]:
    """Return topic → bytes that a source has not read.

    Args:
        source: an element of `sources` in the progress of a micro-batch.
    """
    latest = source.get("latestOffset")
    # Other sources have another value there, or none.
    lag = latest.get(LAG_KEY, {}) if isinstance(latest, Mapping) else {}
    return {topic: one["bytes"] for topic, one in lag.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class FlowStatistics:
    """Counters of a flow since the start of the command."""

    batch_count: int = counter(
        "metaq_pipeline_batches_total", "Micro-batches that a flow has finished."
    )
    row_in_count: int = counter("metaq_pipeline_rows_in_total", "Rows read by a flow.")
    row_out_count: int = counter(
        "metaq_pipeline_rows_out_total",
        "Rows written by a flow, of targets that report them; tables of files do not.",
    )
    duration_s: float = gauge(
        "metaq_pipeline_batch_seconds", "Duration of the newest micro-batch of a flow."
    )
    lag_bytes: Mapping[str, int] = gauge(
        "metaq_pipeline_lag_bytes",
        "Bytes of a topic that a flow has not read, as of its newest micro-batch.",
        default=dict,
        labels=("topic",),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineStatistics:
    """Counters of a run of a pipeline."""

    update_count: int = counter(
        "metaq_pipeline_updates_total", "Updates that were finished without an error."
    )
    flows: Mapping[str, FlowStatistics] = part(
        default=dict, labels=("flow",), label=lambda flow: (flow,)
    )


METRICS: Final = metrics_of(PipelineStatistics)
"""Every metric of a run, in the order of a scrape."""


@dataclass(slots=True)
class PipelineCounters:
    """Counters of a run. One thread adds; any thread may take a snapshot."""

    _snapshot: PipelineStatistics = field(default_factory=PipelineStatistics)

    def statistics(self) -> PipelineStatistics:
        """Return a snapshot."""
        return self._snapshot

    def add_update(self) -> None:
        """Count an update."""
        now = self._snapshot
        self._snapshot = replace(now, update_count=now.update_count + 1)

    def add(self, batch: BatchProgress) -> None:
        """Count a micro-batch."""
        now = self._snapshot
        flow = now.flows.get(batch.flow, FlowStatistics())
        flow = replace(
            flow,
            batch_count=flow.batch_count + 1,
            row_in_count=flow.row_in_count + batch.row_in_count,
            row_out_count=flow.row_out_count + (batch.row_out_count or 0),
            duration_s=batch.duration_s,
            lag_bytes=batch.lag_bytes,
        )
        self._snapshot = replace(now, flows={**now.flows, batch.flow: flow})


_LOCAL: Final = re.compile(r"(?:file:(?://)?)?(/.*)", re.DOTALL)
ESCAPED: Final = re.compile(r"[^\w\-!.~'()*,;:$&+=/@\x80-\U0010ffff]")
"""Characters that Spark escapes in the path of a storage; the names of its directories
have the escapes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FlowStatus:
    """State of a flow, from its checkpoint."""

    flow: str
    target: str
    batch: int | None
    """Number of the last finished micro-batch; None for none."""
    finished_ms: Millis | None


def flows_of(storage: str) -> list[FlowStatus]:
    """Return the flows that have a checkpoint, sorted by target and name.

    Args:
        storage: storage of a pipeline, as path or URL; if it is not local, the result
            is empty.
    """
    local = _LOCAL.fullmatch(storage)
    if local is None:
        return []
    place = ESCAPED.sub(lambda found: f"%{ord(found[0]):02X}", local[1])
    root = Path(place) / "_checkpoints"
    # <target, a directory per part of its name>/<flow>/<version>/commits/<batch>
    found = [
        _flow_status(root, path)
        for path in root.glob("**/[0-9]*/metadata")
        if path.is_file()
    ]
    found.sort(key=lambda pair: pair[0])
    newest = {(each.target, each.flow): each for _version, each in found}
    return [newest[key] for key in sorted(newest)]


def _flow_status(root: Path, metadata: Path) -> tuple[int, FlowStatus]:
    version = metadata.parent
    commits = {
        int(path.name): path
        for path in version.glob("commits/*")
        if path.name.isdigit()
    }
    last = max(commits, default=None)
    steps = version.relative_to(root).parts
    return int(version.name), FlowStatus(
        flow=steps[-2],
        target=steps[-3],
        batch=last,
        finished_ms=(
            None if last is None
            else Millis(round(commits[last].stat().st_mtime * 1000))
        ),
    )  # fmt: skip
