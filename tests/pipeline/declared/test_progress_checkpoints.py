"""The last batch of each flow, by its checkpoint."""

import json
import os
from pathlib import Path

from metaq.model import Millis
from metaq.pipeline.declared.progress import FlowStatus, flows_of


def commit(version: Path, batch: int, moment_s: int) -> None:
    path = version / "commits" / str(batch)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("{}")
    (path.parent / f".{batch}.crc").write_text("")
    (version / "metadata").write_text("{}")
    os.utime(path, (moment_s, moment_s))


def test_the_last_batch_of_each_flow_is_found(tmp_path: Path) -> None:
    """Of its newest checkpoint: each full refresh begins another one."""
    root = tmp_path / "a%20%2520%23é" / "_checkpoints"
    table, sink = root / "spark_catalog/default/counts", root / "alerts"
    for batch in (2, 10, 9):
        commit(table / "counts" / "9", batch, 100 + batch)
    commit(table / "counts" / "10", 0, 500)
    (sink / "alert" / "0").mkdir(parents=True)
    (sink / "alert" / "0" / "metadata").write_text(json.dumps({"id": "x"}))
    assert flows_of(f"file:{tmp_path}/a %20#é") == flows_of(f"{tmp_path}/a %20#é")
    assert flows_of(f"file://{tmp_path}/a %20#é") == [
        FlowStatus(flow="alert", target="alerts", batch=None, finished_ms=None),
        FlowStatus(
            flow="counts", target="counts", batch=0, finished_ms=Millis(500_000)
        ),
    ]
    assert flows_of("s3a://bucket/storage") == []
