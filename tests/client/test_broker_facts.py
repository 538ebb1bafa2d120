"""Texts of `stats`: MetaQ's, ours, and unreadable ones."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from metaq.client.cluster.broker_facts import BrokerFacts, parse_facts
from metaq.errors import UnexpectedReplyError
from metaq.zk.cluster import PARTITIONS_MAX

BROKER = "pid 1\r\nbroker_id 7\r\nslave false\r\n"
CONFIG = """
[system]
brokerId=7
numPartitions=3
unflushThreshold=0
unflushInterval=10000
maxSegmentSize=1048576
maxTransferSize=1048576
[zookeeper]
zk.zkEnable=false
[topic=orders]
numPartitions=5
[topic=mute]
acceptPublish=false
[topic=deaf]
acceptSubscribe=false
[topic=wild-*]
numPartitions=9
"""


def wrap(lines: str) -> str:
    return f"STATS\r\n{lines}END\r\n"


def facts(
    *,
    broker: str = BROKER,
    topics: str = "",
    offsets: str = "",
    config: str | None = None,
) -> BrokerFacts:
    return parse_facts(
        broker=wrap(broker),
        topics=wrap(topics),
        offsets=wrap(offsets),
        config=config,
        source="meta://h:1",
    )


def line(topic: str, *, puts: str = "true", gets: str = "true") -> str:
    return (
        f"{topic} partitions 1 message_count 9 message_bytes 2"
        f" accept_publish {puts} accept_subscribe {gets}\r\n"
    )


@pytest.mark.parametrize(
    ("told", "counts"),
    [
        ({}, {}),
        ({"topics": "t *Empty*\r\n"}, {"t": 1}),
        ({"topics": line("t")}, {"t": 1}),
        (
            {
                "topics": line("t"),
                "offsets": "t part 3 min_offset 0 max_offset 9\r\n"
                "t part 0 min_offset 0 max_offset 0\r\n",
            },
            {"t": 4},
        ),
        ({"offsets": "only-log part 0 min_offset 0 max_offset 0\r\n"}, {"only-log": 1}),
        ({"offsets": f"t part {PARTITIONS_MAX} min_offset 0 max_offset 0\r\n"}, {}),
        ({"offsets": f"t part {'9' * 5000} min_offset 0\r\n"}, {}),
        ({"offsets": "t part -1 min_offset 0\r\nt part\r\n\r\nt\r\n"}, {}),
        ({"topics": "wild-* *Empty*\r\n"}, {}),
        ({"config": CONFIG}, {"orders": 5, "mute": 3, "deaf": 3}),
        (
            {
                "config": CONFIG,
                "topics": line("wild-a"),
                "offsets": "orders part 7 min_offset 0 max_offset 0\r\n",
            },
            {"orders": 8, "mute": 3, "deaf": 3, "wild-a": 3},
        ),
        ({"config": "[system]\r\nbrokerId=x\r\n", "topics": line("t")}, {"t": 1}),
        (
            {
                "config": CONFIG,
                "broker": f"{BROKER}set orders:numPartitions=6\r\n"
                "set more:numPartitions=2\r\nset numPartitions=4\r\nset\r\nset x\r\n",
            },
            {"orders": 6, "mute": 4, "deaf": 4, "more": 2},
        ),
        ({"config": CONFIG, "broker": f"{BROKER}set no:such=6\r\n"}, {}),
    ],
)
def test_the_largest_number_that_anything_names_counts(
    told: dict[str, str], counts: dict[str, int]
) -> None:
    """Logs, configuration and names each give a lower bound."""
    assert facts(**told).counts == counts


def test_a_topic_that_a_pattern_takes_has_partitions_before_its_first_put() -> None:
    """With a configuration as many as its `[system]` says, else one."""
    unread = facts(topics="wild-* *Empty*\r\n")
    assert unread.partition_count("wild-new") == 1
    assert unread.partition_count("tame") == 0
    told = facts(config=CONFIG)
    assert told.partition_count("wild-new") == 3
    assert told.partition_count("tame") == 0
    assert told.partition_count("orders") == 5


def test_topics_closed_to_puts_or_gets_are_told() -> None:
    """Both the statistics and the configuration may say so."""
    for told in (
        facts(config=CONFIG),
        facts(topics=line("mute", puts="false") + line("deaf", gets="false")),
    ):
        assert not told.takes_puts("mute")
        assert told.takes_gets("mute")
        assert told.takes_puts("deaf")
        assert not told.takes_gets("deaf")


def test_a_follower_takes_no_puts() -> None:
    """MetaQ calls it a slave."""
    follower = facts(broker="broker_id 7\r\nslave true\r\n", topics=line("t"))
    assert follower.is_follower
    assert not follower.takes_puts("t")
    assert follower.takes_gets("t")


@pytest.mark.parametrize(
    "broker", ["", "broker_id\r\n", "broker_id -1\r\n", "broker_id 1024\r\n"]
)
def test_without_an_id_nothing_is_believed(broker: str) -> None:
    """The error names the broker and what it said."""
    with pytest.raises(UnexpectedReplyError, match=r"meta://h:1.*broker_id"):
        facts(broker=broker)


def test_a_name_that_is_no_pattern_hides_nothing_else() -> None:
    """One broken name does not make the others unknown."""
    told = facts(topics="a( *Empty*\r\nwild-* *Empty*\r\n")
    assert told.partition_count("wild-x") == 1


@given(st.text(), st.text(), st.text(), st.none() | st.text())
def test_no_text_breaks_the_reader(
    broker: str, topics: str, offsets: str, config: str | None
) -> None:
    """Foreign text gives facts or the one error, never another exception."""
    told = facts(broker=BROKER + broker, topics=topics, offsets=offsets, config=config)
    assert all(count >= 1 for count in told.counts.values())
    assert told.partition_count("nowhere/../at all") == 0


@pytest.mark.parametrize(
    ("line", "epoch"), [("", 0), ("epoch 12\r\n", 12), ("epoch x\r\n", 0)]
)
def test_the_leader_of_a_set_says_its_epoch(line: str, epoch: int) -> None:
    """Other brokers have none."""
    assert facts(broker=BROKER + line).epoch == epoch
