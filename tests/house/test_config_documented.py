"""The comments of `config/server.ini` are true, and nothing is left out."""

import datetime as dt
import re
from pathlib import Path

import pytest

from metaq.broker.schedule import parse_schedule
from metaq.config.keys import (
    LIMITS_KEYS,
    REPLICATION_KEYS,
    SYSTEM_KEYS,
    TOPIC_KEYS,
    ZOOKEEPER_KEYS,
    Key,
    KeyKind,
)
from metaq.config.load import parse_config
from metaq.config.settings import (
    LimitsConfig,
    ReplicationConfig,
    SystemConfig,
    ZooKeeperConfig,
)
from tests.cases import for_each

FILE = Path(__file__).parents[2] / "config" / "server.ini"
SECTIONS = {
    "system": (SYSTEM_KEYS, SystemConfig()),
    "zookeeper": (ZOOKEEPER_KEYS, ZooKeeperConfig()),
    "metaq": (LIMITS_KEYS, LimitsConfig()),
    "replication": (REPLICATION_KEYS, ReplicationConfig()),
    "topic=test": (TOPIC_KEYS, None),
}
# Defaults that depend on where the broker runs.
DERIVED = {
    "hostName": "detected",
    "dataPath": "<home>/meta",
    "dataLogPath": "dataPath",
    "appClassPath": "../provided beside this file's directory",
    "index": "none",
}
KEY_LINE = re.compile(r";?([A-Za-z][A-Za-z.<>]*)=\S.*")


def fact_line(section: str, key: Key) -> str:
    """Return the comment that must stand above a key: all that the table knows."""
    default = SECTIONS[section][1]
    if default is None:
        shown = DERIVED["index"] if key.name == "index" else "as in [system]"
    elif key.is_required:
        shown = "none, required"
    elif key.name in DERIVED:
        shown = DERIVED[key.name]
    else:
        shown = str(getattr(default, key.field))
        shown = shown.lower() if key.kind is KeyKind.BOOLEAN else shown
    kind = "boolean" if key.kind is KeyKind.LENIENT_BOOLEAN else key.kind.value
    facts = [f"type: {kind}" + (f", {key.unit}" if key.unit else "")]
    facts.append(f"default: {shown}")
    if key.kind is KeyKind.INTEGER:
        facts.append(f"range: {key.low}..{key.high}")
    facts.append(f"change takes: {'reload' if key.is_reloadable else 'restart'}")
    return "; " + "; ".join(facts)


def blocks() -> dict[str, dict[str, list[str]]]:
    """Return section → key → the comment lines that stand right above it."""
    found: dict[str, dict[str, list[str]]] = {}
    above: list[str] = []
    section = ""
    for line in FILE.read_text(encoding="ascii").splitlines():
        match = KEY_LINE.fullmatch(line)
        if line.startswith(("[", ";[")):
            section = line.strip(";[]")
            found[section] = {}
        elif match:
            assert match[1] not in found[section], f"{match[1]} occurs twice"
            found[section][match[1]] = above
        above = [*above, line] if line.startswith(";") and not match else []
    return found


BLOCKS = blocks()


@for_each(
    "section, key",
    [(section, key) for section, (keys, _) in SECTIONS.items() for key in keys],
)
def test_every_key_is_present_and_described(section: str, key: Key) -> None:
    """A sentence, then type, unit, default, range and reload as the code has them."""
    comment = BLOCKS[section].get(key.name)
    assert comment is not None, f"[{section}] {key.name} is missing in {FILE.name}"
    assert len(comment) >= 2, f"{key.name}: no sentence"
    assert comment[-1] == fact_line(section, key)


@pytest.mark.parametrize("section", SECTIONS)
def test_no_other_key_is_described(section: str) -> None:
    """A key that the code does not know is not in the file."""
    known = {key.name for key in SECTIONS[section][0]}
    assert set(BLOCKS[section]) - known <= {"group.example"}


def test_the_file_has_no_other_sections_than_a_second_topic() -> None:
    """Sections are those of the table, and the topic that tools use."""
    assert list(BLOCKS) == [*SECTIONS, "topic=meta-test"]


def test_the_file_loads_and_says_what_metaqs_example_says() -> None:
    """Group commit, two topics with two partitions, all limits at their defaults."""
    config = parse_config(FILE.read_bytes(), str(FILE))
    assert config.limits == LimitsConfig()
    assert config.zookeeper == ZooKeeperConfig()
    assert config.ignored_sections == ()
    assert config.system == SystemConfig(
        stat=True,
        update_consumer_offsets=True,
        app_class_path=str(FILE.parent / "../provided"),
    )
    assert list(config.topics) == ["test", "meta-test"]
    assert all(topic.partition_count == 2 for topic in config.topics.values())


def test_commented_out_keys_are_legal_settings() -> None:
    """An operator who removes the semicolon gets a working file."""
    lines = FILE.read_text().splitlines()
    text = "\n".join(
        line.removeprefix(";")
        if KEY_LINE.fullmatch(line) or line.startswith(";[")
        else line
        for line in lines
        if line != ";unflushThreshold=1000"  # not of a set
    )
    config = parse_config(text.encode(), str(FILE))
    assert config.system.host_name == "broker1.example.org"
    assert config.replication == ReplicationConfig(replica_id=1)
    assert config.topic("test").filters == {"example": "com.example.OnlyImportant"}
    assert not config.topic("test").accept_publish
    for topic in config.topics.values():
        parse_schedule(topic.delete_when, dt.UTC)
