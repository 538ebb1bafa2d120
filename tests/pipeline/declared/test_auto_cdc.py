"""Spark's own flow for the latest rows, as docs/spark.md describes it."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.spark_options import PAGE
from tests.pipeline.declared.project import WAIT_S, environment
from tests.spark.classes import VERSION

pytestmark = [
    pytest.mark.spark,
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(VERSION < (4, 3), reason="the flow came later"),
]

HEAD = """from pyspark import pipelines as dp
from pyspark.sql import SparkSession

spark = SparkSession.active()
"""
SPEC = """name: latest
storage: file://{place}/storage
libraries:
  - glob:
      include: transformations/**
configuration:
  metaq.zookeeper: 127.0.0.1:1
"""


def test_the_flow_is_declared_and_refused_by_tables_without_merge(
    tmp_path: Path,
) -> None:
    """The block of the page, unchanged; Spark refuses it before it reads."""
    block = re.search(
        r"```python\n(@dp\.temporary_view\n.*?)```", PAGE.read_text(), re.DOTALL
    )
    assert block is not None
    (tmp_path / "spark-pipeline.yml").write_text(SPEC.format(place=tmp_path))
    definitions = tmp_path / "transformations" / "latest.py"
    definitions.parent.mkdir()
    definitions.write_text(HEAD + block[1])
    words = ["pipeline", "run", str(tmp_path), "--once", "--master", "local[1]"]
    done = subprocess.run(
        [sys.executable, "-m", "metaq", *words],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=WAIT_S,
        check=False,
    )
    assert done.returncode == 1
    assert "AUTOCDC_TARGET_DOES_NOT_SUPPORT_MERGE" in done.stderr, done.stderr[-4000:]
