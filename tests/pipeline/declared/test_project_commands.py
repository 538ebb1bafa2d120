"""`metaq pipeline init`, `run` and `status` with a cluster, without Spark."""

import json
import shutil
from pathlib import Path

import pytest

from metaq.cli.cluster import Target
from metaq.cli.offsets import reset_offsets
from metaq.client import Client
from metaq.model import Offset
from metaq.testing.embedded import EmbeddedBroker
from tests.cli.runner import PATIENCE_S, run
from tests.cli.test_groups import FORCE
from tests.pipeline.declared.project import broker
from tests.spark.classes import VERSION

__all__ = ["broker"]

pytestmark = [
    pytest.mark.spark,
    pytest.mark.zookeeper,
    pytest.mark.skipif(VERSION < (4, 2), reason="the project takes WATERMARK in SQL"),
]

MISSING = (
    "no broker serves lines, lines.dead; create with: metaq topics create lines"
    " --partitions 1; metaq topics create lines.dead --partitions 1"
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


def test_status_shows_all_groups_of_the_project(
    broker: EmbeddedBroker, tmp_path: Path
) -> None:
    """Its name, and its name with a dot; another project's name begins with it."""
    place = tmp_path / "errors"
    zookeeper = str(broker.zookeeper.address)
    done = run("pipeline", "init", str(place), "--zookeeper", zookeeper)
    assert done.exit_code == 0
    done = run("pipeline", "status", str(place))
    assert done.exit_code == 1
    assert "the project has not run yet: there is no group errors," in done.output
    target = Target(zookeeper, "/meta", (), PATIENCE_S)
    for group in ("errors.dead", "errors", "errors2"):
        reset_offsets(target, group, "logs", Offset(0), ("0-0",), FORCE, is_sure=True)
    done = run("pipeline", "status", str(place))
    assert done.exit_code == 0
    named = [line for line in done.output.splitlines() if line.startswith("group ")]
    assert named == ["group errors", "group errors.dead"]
    done = run("pipeline", "status", str(place), "--json")
    groups = json.loads(done.stdout)["groups"]
    assert [each["group"] for each in groups] == ["errors", "errors.dead"]
    assert {part["topic"] for each in groups for part in each["partitions"]} == {"logs"}
