"""The copy of the definitions that a broker reads at its start."""

from pathlib import Path

import pytest

from metaq.broker.definitions import Definitions
from metaq.zk.definitions import (
    COPY_NAME,
    TopicDefinition,
    encode_copy,
    encode_definition,
)
from tests.rigs.broker import CONFIG, make_config
from tests.rigs.fs import FaultyFileSystem

DATA = Path("/data")
CONFIG_OF_DATA = make_config(
    DATA, text=CONFIG.replace("zk.zkEnable=false", "zk.zkEnable=true")
)


def load(data: bytes | None) -> Definitions:
    fs = FaultyFileSystem()
    fs.make_directory(DATA)
    if data is not None:
        fs.write_atomically(DATA / COPY_NAME, data)
    definitions = Definitions(fs, CONFIG_OF_DATA)
    definitions.load()
    return definitions


def test_the_copy_defines_topics_while_zookeeper_is_not_read() -> None:
    """A start without ZooKeeper has the topics of the run before."""
    definitions = load(
        encode_copy({"orders": TopicDefinition(partitions=3)}, encode_definition)
    )
    defined = definitions.decide(CONFIG_OF_DATA, has_log=lambda _: True)
    assert [(name, topic.partition_count) for name, topic in defined.items()] == [
        ("orders", 3)
    ]
    assert definitions.has_settings("other", CONFIG_OF_DATA)


@pytest.mark.parametrize("data", [None, b"0badc0de\n{}\n"])
def test_without_a_good_copy_settings_of_other_topics_are_not_known(
    data: bytes | None,
) -> None:
    """Their data must not age by the defaults: a definition may keep it for longer."""
    definitions = load(data)
    assert definitions.decide(CONFIG_OF_DATA, has_log=lambda _: True) == {}
    assert not definitions.has_settings("other", CONFIG_OF_DATA)
    assert definitions.has_settings("test", CONFIG_OF_DATA)
