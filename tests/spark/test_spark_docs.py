"""Statements of docs/spark.md on options are true, and its snippets run."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from metaq.pipeline.declared.progress import METRICS
from metaq.pipeline.jobs.archive_store import read_archive
from metaq.spark.options import Edge, SourceOptions
from metaq.testing.embedded import embedded_broker
from tests.docs.blocks import blocks_of
from tests.docs.metric_table import table as table_of_metrics
from tests.docs.spark_options import HEAD, PAGE, table
from tests.spark.brokers import tp
from tests.spark.conftest import ROOT
from tests.spark.segment_dirs import payloads, write_log

TEXT = PAGE.read_text()
CREATED = re.findall(r"`metaq topics create (\S+) --partitions 1`", TEXT)
"""Topics that the page has its reader create; `metaq local` has `test`."""
FILES = dict(re.findall(r"```python\n# (\w+\.py)\n(.*?)```", TEXT, re.DOTALL))


def test_the_option_table_is_that_of_the_code() -> None:
    """`python -m tests.docs.spark_options` writes it."""
    assert TEXT.partition(HEAD)[2].partition("\n## ")[0] == table()


def test_the_metrics_of_a_pipeline_are_those_of_the_code() -> None:
    """`python -m tests.docs.metric_table` writes them."""
    assert table_of_metrics(METRICS) in TEXT


def test_every_block_of_python_has_a_name() -> None:
    """One without would not be run."""
    blocks = [b for b in blocks_of(PAGE) if b.language == "python" and not b.reason]
    assert len(blocks) == len(FILES) == 8


def test_every_function_that_is_named_exists() -> None:
    """As does every module."""
    for module in set(re.findall(r"`(metaq\.spark\.[\w.]+)\.\w+`", TEXT)):
        assert (ROOT / module.replace(".", "/")).with_suffix(".py").exists(), module


@pytest.mark.parametrize("is_stream", [False, True])
def test_what_json_leaves_open_is_filled_in_as_the_page_says(is_stream: bool) -> None:
    """Partition 0-1 is read, and the JSON names 0-0 alone."""
    rules = TEXT.partition("| JSON in |")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| `(\w+)` \| (.*?) \| (.*?)\|$", rules, re.MULTILINE)
    stated = {name: (batch, stream)[is_stream] for name, batch, stream in rows}
    wire = {"brokers": "localhost:8123", "subscribe": "logs"}
    for name in (n for n in stated if n.startswith("starting") or not is_stream):
        given = {**wire, name: '{"logs": {"0-0": 5}}'}
        options = SourceOptions.from_map(given, is_stream=is_stream)
        bound = options.starting if name.startswith("s") else options.ending
        edge = bound.of(tp(1))
        assert isinstance(edge, Edge)
        assert f"`{edge.value}`" == stated[name].split(",")[0].strip()
    assert len(stated) == 4


def test_every_topic_of_a_snippet_is_created() -> None:
    """By `metaq local`, or by a command of the page."""
    named = set(re.findall(r'(?:topic|subscribe)="(\w+)"', "".join(FILES.values())))
    assert named == {"test", *CREATED}


@pytest.fixture
def places(tmp_path: Path) -> Iterator[dict[str, str]]:
    """Return what the page's addresses and paths mean here."""
    write_log(tmp_path / "data", payloads(20))
    with embedded_broker(topics={"test": 2, **dict.fromkeys(CREATED, 1)}) as broker:
        yield {
            'zookeeper="127.0.0.1:2181"': f'brokers="{broker.address}"',
            '"/tmp/archive': f'"{tmp_path}/archive',
            '"/data"': f'"{tmp_path}/data"',
            "zookeeper '127.0.0.1:2181'": f"brokers '{broker.address}'",
        }


@pytest.mark.spark
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_snippets_run_one_after_the_other(
    spark: SparkSession, tmp_path: Path, places: dict[str, str]
) -> None:
    """As they stand, but for where things are, in the session of the tests."""
    for block in blocks_of(PAGE):
        text = block.text
        for there, here in places.items():
            text = text.replace(there, here)
        if block.reason:
            continue
        if block.language == "python":
            exec(compile(text, f"{block.page}:{block.line}", "exec"), {})
        elif block.language == "sql":
            assert [spark.sql(each) for each in text.split(";")][-1].count() == 2
    lines = spark.read.parquet(str(tmp_path / "archive" / "lines"))
    assert lines.count() == 1000
    assert read_archive(spark, str(tmp_path / "archive" / "topics")).count() == 1000
