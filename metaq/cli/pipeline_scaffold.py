"""Files of a new declared pipeline: log lines → rows → counts per minute → alerts.

They are written as they stand here; everything that differs between projects is in the
configuration of the specification.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from metaq.errors import ConfigError

SPEC_NAME: Final = "spark-pipeline.yml"
PARAMETERS: Final = "metaq."
"""Begins the names of our parameters in the configuration of a specification."""
ZOOKEEPER: Final = "metaq.zookeeper"
ZK_ROOT: Final = "metaq.zkRoot"
PROGRESS_GROUP: Final = "metaq.progressGroup"
SOURCE_TOPIC: Final = "metaq.sourceTopic"
ALERTS_TOPIC: Final = "metaq.alertsTopic"

LOGS: Final = r'''"""Lines of a log topic → parsed rows; counts of them → alerts.

Counts per minute and level are made in between, by counts.sql.
"""

import re

from pyspark import pipelines as dp
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F

# Each group has a name, and becomes a column; `time` and `level` are counted by.
PATTERN = (
    r"^(?<time>\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d)\S* "
    r"(?:- )?(?<level>[A-Z]+) +(?<text>.*)"
)
ALERT_LEVELS = ("WARN", "WARNING", "ERROR", "FATAL")
ALERT_COUNT = 5
"""Lines of such a level in one minute that are worth an alert."""

# Topics and ZooKeeper are in spark-pipeline.yml.
spark = SparkSession.active()
CLUSTER = {
    "zookeeper": spark.conf.get("metaq.zookeeper"),
    "zkRoot": spark.conf.get("metaq.zkRoot"),
}


def parsed(line: Column) -> dict[str, Column]:
    """Return a column for each group of PATTERN; null where it does not match."""
    groups = re.findall(r"\(\?<(\w+)>", PATTERN)
    texts = {
        name: F.nullif(F.regexp_extract(line, PATTERN, number), F.lit(""))
        for number, name in enumerate(groups, 1)
    }
    return {**texts, "time": F.try_to_timestamp(texts["time"])}


@dp.table(comment="Every line; level and time are null where PATTERN does not match")
def lines() -> DataFrame:
    messages = (
        spark.readStream.format("metaq")
        .options(**CLUSTER, subscribe=spark.conf.get("metaq.sourceTopic"))
        .option("startingOffsets", "earliest")
        .option("progressGroup", spark.conf.get("metaq.progressGroup"))
        .option("maxOffsetsPerTrigger", "500000")
        .load()
    )
    line = F.col("value").cast("string")
    columns = [column.alias(name) for name, column in parsed(line).items()]
    return messages.select(
        "topic", "broker_id", "partition", "offset", *columns, line.alias("line")
    )


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
WHERE level IS NOT NULL AND time IS NOT NULL
GROUP BY window(time, '1 minute'), level
"""

README: Final = """# {name}

Log lines of the topic `{source}` become the table `lines`, counts per minute and level
the table `counts`, and levels that pile up messages of the topic `{alerts}`.

    metaq topics create {alerts} --partitions 1
    metaq produce {source} --file /var/log/some.log
    metaq pipeline run .            # an update every few seconds, until Ctrl-C
    metaq pipeline status .         # how far behind, and the last batch of each flow

Topics and addresses are in `spark-pipeline.yml`, the pattern of a line at the top of
`transformations/logs.py`. Tables and their catalog are in `tables` and `metastore`, the
checkpoints in `storage`: these three belong together. To begin again, run with
`--full-refresh-all`; it writes the alerts again, too.
"""


def write_project(directory: Path, parameters: Mapping[str, str]) -> None:
    """Write a new project.

    Args:
        directory: made where there is none; its name becomes that of the pipeline.
        parameters: the five of this module.

    Raises:
        ConfigError: there is something in the directory.
        OSError: it cannot be written.
    """
    if directory.exists() and any(directory.iterdir()):
        raise ConfigError(f"{directory}: expected an empty directory or none")
    name = directory.resolve().name
    files = {
        SPEC_NAME: _spec(name, directory, parameters),
        "README.md": README.format(
            name=name,
            source=parameters[SOURCE_TOPIC],
            alerts=parameters[ALERTS_TOPIC],
        ),
        "transformations/logs.py": LOGS,
        "transformations/counts.sql": COUNTS,
    }
    for place, text in files.items():
        path = directory / place
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def _spec(name: str, directory: Path, parameters: Mapping[str, str]) -> str:
    storage = (directory.resolve() / "storage").as_uri()
    settings = {
        **parameters,
        "spark.sql.session.timeZone": "UTC",
        "spark.sql.shuffle.partitions": "2",
    }
    # A JSON text is a YAML text, whatever is in it.
    lines = [f"  {key}: {json.dumps(value)}" for key, value in settings.items()]
    return "\n".join(
        [
            f"name: {json.dumps(name)}",
            f"storage: {json.dumps(storage)}",
            "libraries:",
            "  - glob:",
            "      include: transformations/**",
            "configuration:",
            *lines,
            "",
        ]
    )
