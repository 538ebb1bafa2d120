"""Effects of a changed file on a running broker."""

import zlib

import pytest

from metaq.config.load import Reload, parse_config, reload_config
from metaq.errors import ConfigError

BASE = """\
[system]
brokerId=0
serverPort=8123
numPartitions=1
unflushThreshold=0
unflushInterval=10000
maxSegmentSize=1024
maxTransferSize=1024
[zookeeper]
zk.zkConnect=localhost:2181
[metaq]
waitMsMax=1000
[topic=a]
[topic=b]
numPartitions=2
[topic=c]
"""
RUNNING = parse_config(BASE.encode(), "server.ini")


def changes(reload: Reload) -> tuple[tuple[str, ...], ...]:
    return reload.added, reload.removed, reload.changed


def test_an_unchanged_file_changes_nothing() -> None:
    """Reloading is harmless."""
    reload = reload_config(RUNNING, BASE.encode())
    assert reload.config == RUNNING
    assert changes(reload) == ((), (), ())
    assert reload.needs_restart == ()


def test_topics_come_go_and_change() -> None:
    """Only topic sections take effect; the checksum is that of the new file."""
    data = (
        BASE.replace("[topic=a]\n", "")
        .replace("numPartitions=2", "numPartitions=3\ngroup.g=x.F")
        .replace("[topic=c]", "[topic=c]\nnumPartitions=1\n[topic=e]\n[topic=d]")
        .encode()
    )
    reload = reload_config(RUNNING, data)
    assert changes(reload) == (("d", "e"), ("a",), ("b",))
    assert reload.config.topic("b").partition_count == 3
    assert reload.config.topic("b").filters == {"g": "x.F"}
    assert reload.config.data == data
    assert reload.config.checksum == zlib.crc32(data)
    assert reload.needs_restart == ()
    assert changes(reload_config(reload.config, reload.config.data)) == ((), (), ())


def test_other_sections_wait_for_a_restart_and_say_so() -> None:
    """The running values stay, topics inherit them, each difference is named."""
    data = (
        BASE.replace("8123", "9000")
        .replace("numPartitions=1", "numPartitions=4")
        .replace("localhost", "zk1")
        .replace("1000\n", "2000\n")
    ).encode()
    reload = reload_config(RUNNING, data)
    assert reload.config.system == RUNNING.system
    assert reload.config.zookeeper == RUNNING.zookeeper
    assert reload.config.limits == RUNNING.limits
    assert reload.config.topic("a").partition_count == 1
    assert changes(reload) == ((), (), ())
    assert reload.needs_restart == (
        "[system] serverPort: 8123 -> 9000",
        "[system] numPartitions: 1 -> 4",
        "[zookeeper] zk.zkConnect: localhost:2181 -> zk1:2181",
        "[metaq] waitMsMax: 1000 -> 2000",
    )


def test_what_does_not_reach_open_logs_is_named() -> None:
    """Their directory, and whether a put is answered before its sync."""
    data = BASE.replace("[topic=c]", "[topic=c]\nunflushThreshold=9\ndataPath=/other")
    reload = reload_config(RUNNING, data.encode())
    assert reload.changed == ("c",)
    old = RUNNING.topic("c").data_path
    assert reload.needs_restart == (
        f"[topic=c] dataPath: {old} -> /other",
        "[topic=c] unflushThreshold: 0 -> 9",
    )


def test_overrides_of_the_start_hold_on_reload() -> None:
    """Settings of the command line are not undone by the file."""
    overrides = {"serverPort": "0", "extra:numPartitions": "2"}
    running = parse_config(BASE.encode(), "server.ini", overrides)
    reload = reload_config(running, BASE.replace("8123", "9000").encode(), overrides)
    assert reload.config.topics == running.topics
    assert reload.needs_restart == ()


@pytest.mark.parametrize(
    ("old", "new"), [("[topic=b]", "[topic=b/]"), ("brokerId=0", ""), ("=1024", "=x")]
)
def test_a_file_with_any_error_is_refused_as_a_whole(old: str, new: str) -> None:
    """Also an error in a section that a reload would not use."""
    with pytest.raises(ConfigError):
        reload_config(RUNNING, BASE.replace(old, new).encode())
