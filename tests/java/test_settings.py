"""One server.ini, read by MetaQ's own broker and by ours: the same settings."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from py4j.java_gateway import get_field
from py4j.protocol import Py4JJavaError

from metaq.config.load import parse_config
from metaq.errors import ConfigError
from tests.java.jvm import Jvm
from tests.java.server import server_ini

REFUSED = "refused"
Read = dict[str, object] | str


@pytest.fixture(scope="module")
def machine(
    server_jars: list[Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Jvm]:
    with Jvm(server_jars, tmp_path_factory.mktemp("settings")) as jvm:
        yield jvm


def read_by_java(jvm: Jvm, path: Path) -> Read:
    """Return what MetaQ's own broker would run with."""
    config = jvm.metaq.server.utils.MetaConfig()
    try:
        config.loadFromFile(str(path))
        config.verify()
    except Py4JJavaError:
        return REFUSED
    zookeeper = config.getZkConfig()
    topics = {
        name: (topic.getNumPartitions(), topic.isStat(), topic.isAcceptPublish())
        for name, topic in config.getTopicConfigMap().items()
    }
    return {
        "broker": config.getBrokerId(),
        "host": config.getHostName() or "",
        "port": config.getServerPort(),
        "partitions": config.getNumPartitions(),
        "threshold": config.getUnflushThreshold(),
        "interval": config.getUnflushInterval(),
        "segment": config.getMaxSegmentSize(),
        "transfer": config.getMaxTransferSize(),
        "stat": config.isStat(),
        "connect": get_field(zookeeper, "zkConnect"),
        "session": get_field(zookeeper, "zkSessionTimeoutMs"),
        "is_on": get_field(zookeeper, "zkEnable"),
        # It is put in shape when it is used.
        "root": "/" + get_field(zookeeper, "zkRoot").strip("/"),
        "topics": topics,
    }


def read_by_us(path: Path) -> Read:
    try:
        config = parse_config(path.read_bytes(), str(path))
    except ConfigError:
        return REFUSED
    system, zookeeper = config.system, config.zookeeper
    return {
        "broker": system.broker_id,
        "host": system.host_name or "",
        "port": system.server_port,
        "partitions": system.partition_count,
        "threshold": system.unflush_threshold,
        "interval": system.unflush_interval_ms,
        "segment": system.segment_bytes_max,
        "transfer": system.transfer_bytes_max,
        "stat": system.stat,
        "connect": zookeeper.connect,
        "session": zookeeper.session_timeout_ms,
        "is_on": zookeeper.is_enabled,
        "root": zookeeper.root,
        "topics": {
            name: (topic.partition_count, topic.stat, topic.accept_publish)
            for name, topic in config.topics.items()
        },
    }


NUMBERS = (
    "1024*1024", " 7 * 8 ", "(1+2)*3", "10/3", "7%3", "-(2+3)*4", "-7/2", "7/-2",
    "-7%3", "7%-3", "1-2-3", "--1", "2*-3", "007", "1024*010", "5;", "5-", "1 2", "x",
    "2**3", "+5", "1.5", "10.0", "1e3", "true", "", "1024*1024*1024*2-1",
)  # fmt: skip
BOOLEANS = ("true", "false", "TRUE", "yes", "1", "tru", "")
ROOTS = ("/a", "a", "a/b", "/a/", "/", "")
SECTIONS = (
    "[topic=test]\nfoo=1\n",
    "[topic=test]\ngroup.g=a.B\n",
    "[topic=test]\n[slave]\nanything=1\n",
    "[topic=test]\n[metaq]\nhttpPort=0\n",
    "[topic=\u6d88\u606f]\nnumPartitions=3\n",
    "[topic=a=b]\n",
    "[ topic=test ]\n",
    "[other=test]\n[topic=b]\n",
    "[topic=test]\n# one\n; two\nnumPartitions : 3\n",
    "[topic=test]\n  numPartitions   =   3  \n",
    "[topic=test]\nnumpartitions=3\n",
    "",
)


def files() -> Iterator[tuple[str, str]]:
    """Yield what is odd in a file, and the file."""

    def file(topics: str = "[topic=test]\n", /, **system: Any) -> str:
        settings = {"brokerId": 0, **system}
        return server_ini("h1:1,h2:2/x", Path("/data"), {}, settings) + topics

    yield "nothing", file()
    yield "line ends", file().replace("\n", "\r\n")
    for text in NUMBERS:
        yield f"unflushThreshold={text}", file(unflushThreshold=text)
    for text in BOOLEANS:
        yield f"stat={text}", file(stat=text)
        for key in ("stat", "acceptPublish"):
            yield f"topic {key}={text}", file(f"[topic=test]\n{key}={text}\n")
    for text in ROOTS:
        yield f"root={text}", file().replace("[topic", f"zk.zkRoot={text}\n[topic")
    for text in SECTIONS:
        yield repr(text), file(text)
    for key in ("brokerId", "numPartitions", "maxSegmentSize", "unflushInterval"):
        yield f"blank {key}", file(**{key: ""})
    for key in ("foo", "hostname", "topics", "lastModified", "quartzThreadCount"):
        yield f"key {key}", file(**{key: 1})


@pytest.mark.parametrize(("what", "text"), list(files()))
def test_a_file_means_the_same(
    machine: Jvm, tmp_path: Path, what: str, text: str
) -> None:
    """Numbers that are expressions, both separators, sections and keys; refusals."""
    (tmp_path / "conf").mkdir()
    path = tmp_path / "conf" / "server.ini"
    path.write_text(text, newline="")
    assert read_by_us(path) == read_by_java(machine, path), what


@pytest.mark.parametrize("section", ["Topic=test", "topik=test", "topic = test"])
def test_a_misspelt_section_is_lost_there_and_refused_here(
    machine: Jvm, tmp_path: Path, section: str
) -> None:
    """docs/decisions/0020-misspelt-sections.md: on purpose not the same."""
    (tmp_path / "conf").mkdir()
    path = tmp_path / "conf" / "server.ini"
    settings = server_ini("h1:1", Path("/data"), {}, {"brokerId": 0})
    path.write_text(f"{settings}[{section}]\n[topic=b]\n")
    there = read_by_java(machine, path)
    assert isinstance(there, dict)
    assert list(there["topics"]) == ["b"]  # type: ignore[call-overload]  # a dict
    assert read_by_us(path) == REFUSED
