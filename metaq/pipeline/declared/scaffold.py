"""Files of a new declared pipeline: log lines → rows → counts per minute → alerts.

A line that does not decode becomes a dead letter.

The files are copied from `project/`; only the README has names filled in. Everything
else that differs between projects is in the configuration of the specification.
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
DELIVERY: Final = "metaq.delivery"
"""Key of the delivery of alerts and dead letters."""
TOPICS: Final = (SOURCE_TOPIC, ALERTS_TOPIC, DEAD_LETTER_TOPIC)
"""Keys of the topics that must exist before a run starts Spark."""

TEMPLATES: Final = Path(__file__).with_name("project")
"""Directory of the other files of a project, each `<name>.template`."""


def create_project(
    directory: Path, *, zookeeper: str, root: str, source: str, alerts: str
) -> tuple[str, ...]:
    """Write a new project.

    Args:
        directory: created if it does not exist; its name is that of the pipeline and
            of the group to which it commits.
        zookeeper: addresses of ZooKeeper.
        root: root of MetaQ's nodes.
        source: topic of the log lines.
        alerts: topic for the alerts.

    Returns:
        Its topics: source, alerts and dead letters.

    Raises:
        ConfigError: the directory is not empty, its name is not valid for a group, or
            Spark would escape its path; a topic's name is invalid, or both are the
            same; the installed PySpark is too old for the project.
        OSError: the files cannot be written.
    """
    # SQL has watermarks since that version.
    require_version((4, 2), "a new project")
    name = check_group(directory.resolve().name)
    if marks := sorted(set(ESCAPED.findall(str(directory.resolve())))):
        raise ConfigError(
            f"{directory}: Spark would keep the checkpoints in another directory:"
            f" expected a path without {' '.join(map(repr, marks))}"
        )
    check_topics((source, alerts))
    if source == alerts:
        raise ConfigError(
            "expected another topic for alerts than that of the log lines, got"
            f" {source}"
        )
    if directory.exists() and any(directory.iterdir()):
        raise ConfigError(f"{directory}: expected an empty directory or none")
    letters = f"{source}.dead"  # as for the dead letters of consumers
    parameters = {
        ZOOKEEPER: zookeeper,
        ZK_ROOT: root,
        PROGRESS_GROUP: name,
        SOURCE_TOPIC: source,
        ALERTS_TOPIC: alerts,
        DEAD_LETTER_TOPIC: letters,
        DELIVERY: "exactly-once",
    }
    files = {
        SPEC_NAME: _spec(name, directory, parameters),
        "README.md": _template("README.md").format(
            name=name, source=source, alerts=alerts, letters=letters
        ),
        "transformations/logs.py": _template("transformations/logs.py"),
        "transformations/counts.sql": _template("transformations/counts.sql"),
    }
    for place, text in files.items():
        path = directory / place
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return source, alerts, letters


def write_at_least_once(directory: Path) -> None:
    """Change a new project to need no transactions, which replica sets refuse."""
    path = directory / SPEC_NAME
    text = path.read_text()
    path.write_text(text.replace('"exactly-once"', '"at-least-once"'))


def _template(place: str) -> str:
    return (TEMPLATES / f"{place}.template").read_text()


def _spec(name: str, directory: Path, parameters: Mapping[str, str]) -> str:
    # Not escaped, because Spark escapes it itself, and would escape it twice.
    storage = f"file://{directory.resolve() / 'storage'}"
    settings = {
        **parameters,
        "spark.sql.session.timeZone": "UTC",
        "spark.sql.shuffle.partitions": "2",
    }
    # JSON is valid YAML.
    lines = (f"  {key}: {json.dumps(value)}\n" for key, value in settings.items())
    return f"""\
name: {json.dumps(name)}
storage: {json.dumps(storage)}
libraries:
  - glob:
      include: transformations/**
configuration:
{"".join(lines)}"""
