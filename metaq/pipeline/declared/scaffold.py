"""Files of a new declared pipeline: log lines → rows → counts per minute → alerts.

A line that does not decode becomes a dead letter.

They are written as they are here; everything that differs between projects is in the
configuration of the specification.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from metaq.client.names import check_group, check_topics
from metaq.errors import ConfigError
from metaq.pipeline.declared.progress import ESCAPED
from metaq.pipeline.installed import require_version

SPEC_NAME: Final = "spark-pipeline.yml"
ZOOKEEPER: Final = "metaq.zookeeper"
ZK_ROOT: Final = "metaq.zkRoot"
PROGRESS_GROUP: Final = "metaq.progressGroup"
SOURCE_TOPIC: Final = "metaq.sourceTopic"
ALERTS_TOPIC: Final = "metaq.alertsTopic"
DEAD_LETTER_TOPIC: Final = "metaq.deadLetterTopic"
TOPICS: Final = (SOURCE_TOPIC, ALERTS_TOPIC, DEAD_LETTER_TOPIC)
"""Keys of the topics that have to be there before a run starts Spark."""

LOGS: Final = r'''"""Lines of a log topic → rows, dead letters; counts of rows → alerts.

Counts per minute and level are made in between, by counts.sql.
"""

from pyspark import pipelines as dp
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from metaq.pipeline import decode

# RE2; it matches a line as a whole. Each group has a name, and becomes a column of the
# type that SCHEMA says. `metaq pipeline schema TOPIC` proposes both for other lines.
PATTERN = (
    r"(?P<time>\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d(?:[.,]\d+)?(?:Z|[+-]\d\d:?\d\d)?)"
    r" (?:- )?(?P<level>[A-Z]+) +(?P<text>(?s:.*))"
)
SCHEMA = "time TIMESTAMP NOT NULL, level STRING NOT NULL, text STRING"
ALERT_LEVELS = ("WARN", "WARNING", "ERROR", "FATAL")
ALERT_COUNT = 5
"""Lines of such a level in one minute that are worth an alert."""

# Topics and ZooKeeper are in spark-pipeline.yml.
spark = SparkSession.active()
CLUSTER = {
    "zookeeper": spark.conf.get("metaq.zookeeper"),
    "zkRoot": spark.conf.get("metaq.zkRoot"),
}
GROUP = spark.conf.get("metaq.progressGroup")
line = decode.pattern(PATTERN, SCHEMA)


def decoded(group: str) -> DataFrame:
    """Return messages with `decoded`: a row, or the error of a line that has none.

    Each flow reads them for itself, and has a group that shows how far it is.
    """
    messages = (
        spark.readStream.format("metaq")
        .options(**CLUSTER, subscribe=spark.conf.get("metaq.sourceTopic"))
        .option("startingOffsets", "earliest")
        .option("progressGroup", group)
        .option("maxOffsetsPerTrigger", "500000")
        .load()
    )
    return messages.withColumn("decoded", line("value"))


@dp.table(comment="A row for each line that PATTERN matches; others are dead letters")
def lines() -> DataFrame:
    place = ("topic", "broker_id", "partition", "offset")
    rows = decoded(GROUP).where("decoded.error IS NULL")
    return rows.select(*place, "decoded.row.*")


dp.create_sink(
    "dead_letters",
    format="metaq",
    options={
        **CLUSTER,
        "topic": spark.conf.get("metaq.deadLetterTopic"),
        "delivery": "exactly-once",
    },
)


@dp.append_flow(target="dead_letters")
def dead_letter() -> DataFrame:
    return decode.dead_letters(decoded(f"{GROUP}.dead"))


dp.create_sink(
    "alerts",
    format="metaq",
    options={
        **CLUSTER,
        "topic": spark.conf.get("metaq.alertsTopic"),
        "delivery": "exactly-once",
    },
)


@dp.append_flow(target="alerts")
def alert() -> DataFrame:
    is_many = F.col("level").isin(*ALERT_LEVELS) & (F.col("count") >= ALERT_COUNT)
    return (
        spark.readStream.table("counts")
        .where(is_many)
        .select(
            F.col("level").alias("key"),
            F.to_json(F.struct("minute", "level", "count")).alias("value"),
        )
    )
'''

COUNTS: Final = """-- A minute is written when a line a minute younger than it has come;
-- a line that comes later than that is not counted.
CREATE STREAMING TABLE counts AS
SELECT window.start AS minute, level, count(*) AS count
FROM STREAM lines WATERMARK time DELAY OF INTERVAL 1 MINUTE
GROUP BY window(time, '1 minute'), level
"""

README: Final = """# {name}

Log lines of the topic `{source}` become the table `lines`, counts per minute and level
the table `counts`, and levels that pile up messages of the topic `{alerts}`. A line
that does not decode goes to the topic `{letters}` as it was, with the cause in its
headers.

    metaq topics create {alerts} --partitions 1
    metaq topics create {letters} --partitions 1
    metaq produce {source} --file /var/log/some.log
    metaq pipeline run .            # an update every few seconds, until Ctrl-C
    metaq pipeline status .         # unread bytes, and the last batch of each flow

Topics and addresses are in `spark-pipeline.yml`. The pattern of a line, with the types
of its groups, is at the top of `transformations/logs.py`. This proposes one, and says
how many lines fit:

    metaq pipeline schema {source}

Tables and their catalog are in `tables` and `metastore`, the checkpoints in `storage`:
these three belong together. To begin again, run with `--full-refresh-all`; it writes
alerts and dead letters again, too.
"""


def create_project(
    directory: Path, *, zookeeper: str, root: str, source: str, alerts: str
) -> tuple[str, ...]:
    """Write a new project.

    Args:
        directory: made where there is none; its name becomes that of the pipeline and
            of the group that it commits to.
        zookeeper: addresses of ZooKeeper.
        root: root of MetaQ's nodes.
        source: topic of the log lines.
        alerts: topic for the alerts.

    Returns:
        Its topics.

    Raises:
        ConfigError: the directory is not empty, its name is not a group's, or Spark
            would escape its path; a topic's name is wrong, or both are the same; an
            installed PySpark is too old for the project.
        OSError: it cannot be written.
    """
    # A watermark in SQL came with it.
    require_version((4, 2), "a new project")
    name = check_group(directory.resolve().name)
    if marks := sorted(set(ESCAPED.findall(str(directory.resolve())))):
        raise ConfigError(
            f"{directory}: Spark would keep the checkpoints in another directory:"
            f" expected a path without {' '.join(map(repr, marks))}"
        )
    check_topics((source, alerts))
    if source == alerts:
        raise ConfigError(f"alerts in the topic {source} would be lines of it")
    if directory.exists() and any(directory.iterdir()):
        raise ConfigError(f"{directory}: expected an empty directory or none")
    letters = f"{source}.dead"  # as consumers name theirs
    parameters = {
        ZOOKEEPER: zookeeper,
        ZK_ROOT: root,
        PROGRESS_GROUP: name,
        SOURCE_TOPIC: source,
        ALERTS_TOPIC: alerts,
        DEAD_LETTER_TOPIC: letters,
    }
    files = {
        SPEC_NAME: _spec(name, directory, parameters),
        "README.md": README.format(
            name=name, source=source, alerts=alerts, letters=letters
        ),
        "transformations/logs.py": LOGS,
        "transformations/counts.sql": COUNTS,
    }
    for place, text in files.items():
        path = directory / place
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return source, alerts, letters


def _spec(name: str, directory: Path, parameters: Mapping[str, str]) -> str:
    # As it is: Spark escapes it, and would escape the escapes of a URL again.
    storage = f"file://{directory.resolve() / 'storage'}"
    settings = {
        **parameters,
        "spark.sql.session.timeZone": "UTC",
        "spark.sql.shuffle.partitions": "2",
    }
    # Every JSON text is a YAML text.
    lines = (f"  {key}: {json.dumps(value)}\n" for key, value in settings.items())
    return f"""\
name: {json.dumps(name)}
storage: {json.dumps(storage)}
libraries:
  - glob:
      include: transformations/**
configuration:
{"".join(lines)}"""
