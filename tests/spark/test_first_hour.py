"""First steps of a user: a script without any set-up, a table, one sentence."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

from metaq.pipeline.jobs.session import NOT_FOUND_CURE, sentence_of
from metaq.spark.errors import OptionError, one_sentence
from metaq.testing.embedded import EmbeddedBroker, embedded_broker
from tests.spark.brokers import TOPIC, numbered, options_of, publish, values, wire

pytestmark = [pytest.mark.spark, pytest.mark.slow, pytest.mark.timeout(900)]

SCRIPT = """
import json, sys
from pyspark.sql import SparkSession

spark = (
    SparkSession.builder.master("local[1]")
    .config("spark.ui.enabled", "false")
    .config("spark.driver.host", "127.0.0.1")
    .config("spark.driver.bindAddress", "127.0.0.1")
    .config("spark.driver.extraJavaOptions", "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC")
    .getOrCreate()
)
options = json.loads(sys.argv[1])

from metaq.errors import MetaqError
from metaq.pipeline.jobs.window_stats import stats

try:
    stats(spark, options)
except MetaqError as error:
    print(error)

import metaq.spark

metaq.spark.register(spark)
print(spark.read.format("metaq").options(**options).load().count())
"""


@pytest.fixture
def broker() -> Iterator[EmbeddedBroker]:
    """Return a broker with messages in both partitions of its topic."""
    with embedded_broker(topics={TOPIC: 2}) as found:
        publish(found, numbered(100))
        yield found


def run_bare(directory: Path, *arguments: str) -> list[str]:
    """Run the script by its interpreter alone, and return its last two lines.

    Nothing is activated, no variable is set, and the first `python3` of the path is
    one that has no package at all.
    """
    script, other = directory / "script.py", directory / "bin"
    script.write_text(SCRIPT)
    other.mkdir()
    base = Path(sys.base_prefix, "bin", "python3")
    (other / "python3").symlink_to(base.resolve())
    kept = {
        name: os.environ[name] for name in ("HOME", "JAVA_HOME") if name in os.environ
    }
    done = subprocess.run(
        [sys.executable, str(script), *arguments],
        cwd=directory,
        env={
            **kept,
            "PATH": os.pathsep.join([str(other), *_without_ours()]),
            "SPARK_LOCAL_IP": "127.0.0.1",
        },
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout.splitlines()[-2:]


def _without_ours() -> list[str]:
    ours = str(Path(sys.prefix, "bin"))
    return [step for step in os.environ["PATH"].split(os.pathsep) if step != ours]


def test_a_script_that_registers_needs_no_set_up(
    broker: EmbeddedBroker, tmp_path: Path
) -> None:
    """Spark starts another Python than the script's; a job before that names the cure.

    It takes the format of a session that has it, and does not register it itself.
    """
    text, count = run_bare(tmp_path, json.dumps(wire(broker, subscribe=TOPIC)))
    assert text == f"stats: {NOT_FOUND_CURE}"
    assert count == "100"


def test_a_table_is_read_with_the_options_it_was_made_with(
    spark: SparkSession, broker: EmbeddedBroker
) -> None:
    """Spark itself hands them to no query; a wrong one is refused at once."""
    options = wire(
        broker, subscribe=TOPIC, valueFormat="string", zkRoot='/it\'s \\ "x"'
    )
    options["zookeeper"] = "h:1"
    for wrong, sentence in (
        (options, "exactly one of zookeeper, brokers"),
        ({"subscribed": "x"}, "unknown option 'subscribed'"),
    ):
        with pytest.raises(PySparkException, match=sentence):
            spark.sql(f"CREATE TABLE refused USING metaq OPTIONS ({listed(wrong)})")
    del options["zookeeper"], options["zkRoot"]
    options["subscribe"] = "logs,it's"
    publish(broker, [], partition=None)
    broker.create_topic("it's")
    spark.sql(f"CREATE TABLE ours USING metaq OPTIONS ({listed(options)}) COMMENT 'x'")
    try:
        rows = spark.sql("SELECT value FROM ours WHERE topic = 'logs'").collect()
        assert sorted(row.value.encode() for row in rows) == numbered(100)
        with pytest.raises(PySparkException, match="a table of this format is for"):
            spark.sql("INSERT INTO ours (value) VALUES ('x')")
    finally:
        spark.sql("DROP TABLE ours")


def listed(options: dict[str, str]) -> str:
    def quoted(text: str) -> str:
        return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"

    return ", ".join(f"{name} {quoted(text)}" for name, text in options.items())


def first_lines(error: BaseException) -> str:
    """Return the text in front of anything that names a line of code."""
    text = str(error)
    assert "Traceback" not in text
    return "\n".join(text.splitlines()[:2])


def test_errors_reach_the_user_as_one_sentence(
    spark: SparkSession, broker: EmbeddedBroker, tmp_path: Path
) -> None:
    """Of the source and of the sink, of the driver and of tasks, batch and stream."""
    wrong = options_of(broker, subscribe=TOPIC, startingOffsets="group")
    with pytest.raises(PySparkException) as found:
        spark.read.format("metaq").options(**wrong).load().collect()
    assert "OptionError: startingOffsets=group needs group" in first_lines(found.value)
    bad = options_of(broker, subscribe=TOPIC, valueFormat="json", valueSchema="a INT")
    with pytest.raises(PySparkException) as found:
        spark.read.format("metaq").options(**bad).load().collect()
    assert "BadRowError: logs/0-0: bad value at offset 0" in first_lines(found.value)
    rows = spark.createDataFrame([("v", None)], "value string, topic string")
    with pytest.raises(PySparkException) as found:
        rows.write.format("metaq").options(**options_of(broker)).mode("append").save()
    assert "RowError: a row names no topic" in first_lines(found.value)
    away = options_of(broker, subscribe=TOPIC, startingOffsets='{"logs": {"0-9": 0}}')
    query = (
        spark.readStream.format("metaq").options(**away).load()
        .writeStream.format("noop")
        .option("checkpointLocation", str(tmp_path / "checkpoint"))
        .start()
    )  # fmt: skip
    with pytest.raises(PySparkException) as found:
        query.awaitTermination(120)
    assert "NoBrokerError: no broker has logs/0-9" in first_lines(found.value)
    assert values(
        spark.read.format("metaq").options(**options_of(broker, subscribe=TOPIC)).load()
    ) == numbered(100)


def test_traces_are_hidden_in_workers_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Foreign errors keep their trace, and so does a driver's own process."""
    hidden = "SPARK_HIDE_TRACEBACK"

    @one_sentence
    def fail(error: Exception) -> None:
        raise error

    monkeypatch.delenv(hidden, raising=False)
    with pytest.raises(OptionError):
        fail(OptionError("no"))
    assert hidden not in os.environ
    monkeypatch.setenv("PYTHON_WORKER_FACTORY_SECRET", "x")
    with pytest.raises(ValueError, match="bug"):
        fail(ValueError("bug"))
    assert hidden not in os.environ
    with pytest.raises(OptionError):
        fail(OptionError("no"))
    assert os.environ.pop(hidden) == "1"


def test_a_missing_format_is_told_with_its_cure() -> None:
    error = PySparkException("[DATA_SOURCE_NOT_FOUND] Failed to find: metaq. Make sure")
    assert sentence_of(error) == NOT_FOUND_CURE
