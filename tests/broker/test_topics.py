"""Which topics and partitions take puts (docs/metaq-1.4/broker.md 2.2, 2.10, 2.11)."""

from pathlib import Path

import pytest

from metaq.broker.topics import ServedExchange, Topics
from metaq.clock import SystemClock
from metaq.errors import AdminError, ForbiddenError, ServerError
from metaq.model import LogId
from metaq.routing.match import ExchangeKind, Matcher
from metaq.storage.log_manager import LogManager
from tests.rigs.broker import CONFIG, make_config
from tests.rigs.fs import FaultyFileSystem

DATA = Path("/data")


def make_topics(text: str = CONFIG, choose=lambda count: count - 1) -> Topics:
    config = make_config(DATA, text=text)
    logs = LogManager(FaultyFileSystem(), SystemClock(), lambda call: call(), config)
    return Topics(config, logs, choose=choose)


@pytest.mark.parametrize(
    ("topic", "partition", "detail"),
    [
        ("nosuch", 0, "The server do not accept topic nosuch"),
        ("../x", 0, "The server do not accept topic ../x"),
        ("wild", 0, "The server do not accept topic wild"),
        ("test", 2, "wrong partition 2"),
        ("test", -2, "wrong partition -2"),
        ("nosuch", -1, "The server do not accept topic nosuch"),
    ],
)
def test_what_does_not_exist_is_refused(
    topic: str, partition: int, detail: str
) -> None:
    """The detail of the 500 names the topic or the partition as sent."""
    with pytest.raises(ServerError) as caught:
        make_topics().resolve_put(topic, partition)
    assert str(caught.value) == detail


def test_an_exchange_that_is_not_served_is_refused_as_one() -> None:
    """Not one that is here, which has no partitions. A deleted one may be a topic."""
    topics, one = make_topics(), ServedExchange("e", Matcher(ExchangeKind.FANOUT), None)
    for exchanges, unserved, former, detail in (
        ({}, {}, (), "do not accept topic e"),
        ({"e": one}, {}, (), "do not accept topic e"),
        ({}, {}, {"e"}, r"'e' is no exchange on this broker \[no-exchange\]"),
        ({}, {"e": "too new"}, (), r"'e' is not served .*: too new \[no-exchange\]"),
    ):
        topics.set_exchanges(exchanges, unserved, former)
        with pytest.raises(ServerError, match=detail):
            topics.resolve_put("e", 0)
    topics.set_exchanges({}, {"wild-x": "too new"}, {"wild-y"})
    with pytest.raises(ServerError, match="too new"):
        topics.resolve_put("wild-x", 0)
    assert topics.resolve_put("wild-y", 0) == 0


@pytest.mark.parametrize("topic", ["test", "wild-", "wild-x", "wild-*"])
def test_configured_topics_and_patterns_are_accepted(topic: str) -> None:
    """Partitions 0 and 1 exist for each."""
    topics = make_topics()
    assert [topics.resolve_put(topic, p) for p in (0, 1)] == [0, 1]


@pytest.mark.parametrize(("closed", "chosen"), [((0, 0), 1), ((1, 1), 0)])
def test_any_partition_means_any_open_one(closed: tuple[int, int], chosen: int) -> None:
    """Row 8: the random choice never hits a closed partition."""
    for choose in (lambda _count: 0, lambda count: count - 1):
        topics = make_topics(choose=choose)
        topics.close_partitions("test", start=closed[0], end=closed[1])
        assert topics.resolve_put("test", -1) == chosen


def test_no_open_partition_is_forbidden() -> None:
    """When all are closed, any partition is 403 like each of them."""
    topics = make_topics()
    topics.close_partitions("test", start=0, end=1)
    for partition, name in ((0, "0-0"), (1, "0-1"), (-1, "0--1")):
        with pytest.raises(ForbiddenError, match=rf"partition\[{name}\] has been"):
            topics.resolve_put("test", partition)
    assert topics.closed_partitions() == {"test": (0, 1)}
    topics.open_partitions("test", start=0, end=None)
    assert topics.closed_partitions() == {}


@pytest.mark.parametrize(
    ("topic", "start", "end"),
    [
        ("nosuch", 0, 0),
        ("wild-x", 0, 0),
        ("test", 1, 0),
        ("test", -1, 0),
        ("test", 0, 2),
    ],
)
def test_a_wrong_range_closes_nothing(topic: str, start: int, end: int) -> None:
    """MetaQ only logs it; here the caller is told."""
    topics = make_topics()
    with pytest.raises(AdminError):
        topics.close_partitions(topic, start=start, end=end)
    assert topics.closed_partitions() == {}


def test_whatever_changes_an_answer_changes_the_version() -> None:
    """Callers that remember answers look at the version alone."""
    topics = make_topics()
    seen = [topics.version]
    topics.close_partitions("test", start=0, end=0)
    seen.append(topics.version)
    topics.open_partitions("test", start=0, end=None)
    seen.append(topics.version)
    topics.apply(make_config(DATA))
    seen.append(topics.version)
    assert seen == sorted(set(seen))


def test_reload_adds_patterns_and_takes_counts_over() -> None:
    """A removed topic stays legal; a changed count is in effect at once (2.2, 2.11)."""
    topics = make_topics()
    text = CONFIG.replace("[topic=test]", "[topic=new]\nnumPartitions=5\nstat=false")
    topics.apply(make_config(DATA, text=text))
    assert topics.resolve_put("new", 4) == 4
    assert topics.resolve_put("test", 1) == 1
    assert (topics.has_stat("meta-test"), topics.has_stat("new")) == (True, False)


@pytest.mark.parametrize("text", [CONFIG, CONFIG.replace("[topic=test]", "")])
def test_what_a_reload_leaves_closed_can_be_opened(text: str) -> None:
    """Partitions beyond a lower count, and those of a topic that was removed."""
    topics = make_topics()
    topics.apply(make_config(DATA, text=CONFIG.replace("=2", "=4")))
    topics.close_partitions("test", start=0, end=None)
    assert topics.closed_partitions() == {"test": (0, 1, 2, 3)}
    topics.apply(make_config(DATA, text=text))
    topics.open_partitions("test", start=3, end=3)
    assert topics.closed_partitions() == {"test": (0, 1, 2)}
    topics.open_partitions("test")
    assert topics.closed_partitions() == {}


def test_only_what_a_put_could_make_may_appear() -> None:
    """A get that waits for a log must not wait for one that cannot come."""
    topics = make_topics()
    assert topics.may_appear("wild-x", 1)
    assert not topics.may_appear("wild-x", 2)
    assert not topics.may_appear("nosuch", 0)
    assert topics.find_log("test", 0) is None
    assert LogId("test", 0) not in {log.log_id for log in topics.logs()}
