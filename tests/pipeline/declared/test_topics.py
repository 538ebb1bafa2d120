"""Topics of a project that no broker serves: named before Spark starts, or created."""

import shutil
from pathlib import Path

import pytest

from metaq.client import Client
from metaq.testing.embedded import EmbeddedBroker
from tests.cli.runner import run
from tests.pipeline.declared.project import broker
from tests.spark.classes import VERSION

__all__ = ["broker"]

pytestmark = [
    pytest.mark.spark,
    pytest.mark.zookeeper,
    pytest.mark.skipif(VERSION < (4, 2), reason="the project takes WATERMARK in SQL"),
]

MISSING = (
    "no broker serves lines, lines.dead: metaq topics create lines --partitions 1;"
    " metaq topics create lines.dead --partitions 1"
)


def test_missing_topics_are_named_before_spark_starts_and_created_if_asked(
    broker: EmbeddedBroker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = tmp_path / "errors"
    init = ("pipeline", "init", str(place), "--topic", "lines")
    init += ("--zookeeper", str(broker.zookeeper.address))
    done = run(*init)
    assert done.exit_code == 0
    assert MISSING in done.output

    # Spark would be found here.
    monkeypatch.setenv("PYSPARK_GATEWAY_PORT", "1")
    done = run("pipeline", "run", str(place))
    assert done.exit_code == 2
    assert f"{place}: {MISSING}" in done.output

    shutil.rmtree(place)
    done = run(*init, "--create-topics")
    assert done.exit_code == 0
    assert "no broker serves" not in done.output
    with Client(str(broker.zookeeper.address)) as client:
        assert {"lines", "alerts", "lines.dead"} <= set(client.topics())
    done = run("pipeline", "run", str(place))
    assert "run this command by itself, not by spark-submit" in done.output
