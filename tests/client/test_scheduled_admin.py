"""Scheduled messages: listed and cancelled by topic and time; in both worlds."""

import datetime as dt
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from metaq.client import NoTopicError, PartitionsAwayError
from metaq.client.cluster.scheduled import ScheduledBatch, parse_listing
from metaq.errors import BadReplyError
from metaq.model import BrokerId, MessageId, Millis, Offset, TopicPartition
from tests.brokers import AnyBroker, StartBroker
from tests.client.worlds import QUICK, WORLDS
from tests.rigs.waiting import wait_until

HOUR = dt.timedelta(hours=1)


@pytest.fixture
def broker(start_broker: StartBroker) -> AnyBroker:
    return start_broker(topics={"test": 1, "other": 2})


@pytest.fixture(params=["sync", "async"])
def client(request: pytest.FixtureRequest, broker: AnyBroker) -> Iterator[Any]:
    with WORLDS[request.param](**broker.client_options, **QUICK) as one:
        yield one


def schedule(client: Any) -> dt.datetime:
    """Send to two topics, for three hours from a full one on; return the first."""
    start = dt.datetime.now(dt.UTC).replace(minute=0, second=0, microsecond=0)
    start += 48 * HOUR
    producer = client.producer()
    producer.send_many("test", [b"a", b"b", b"c"], deliver_at=start)
    producer.send("test", b"d", deliver_at=start + HOUR)
    producer.send("other", b"e", partition="0-1", deliver_at=start + 2 * HOUR)
    return start


@pytest.mark.slow
def test_a_listing_counts_by_hour_and_names_the_soonest(
    client: Any, broker: AnyBroker
) -> None:
    """By topic and time; where nothing can wait there is nothing."""
    admin = client.admin()
    if not broker.has_extensions:
        found = admin.scheduled()
        assert (found.message_count, found.problems) == (0, ())
        return
    start = schedule(client)
    found = admin.scheduled()
    assert found.message_count == 5
    assert found.size_bytes > 0
    assert found.hours == {start: 3, start + HOUR: 1, start + 2 * HOUR: 1}
    rows = [(b.partition.topic, b.due, b.message_count) for b in found.soonest]
    assert rows == [
        ("test", start, 3),
        ("test", start + HOUR, 1),
        ("other", start + 2 * HOUR, 1),
    ]
    assert found.soonest[2].partition.name == "0-1"
    assert [b.due for b in admin.scheduled(count_max=1).soonest] == [start]
    some = admin.scheduled("test", since=start + HOUR, until=start + 2 * HOUR)
    assert (some.message_count, list(some.hours)) == (1, [start + HOUR])


@pytest.mark.slow
def test_what_waits_is_taken_back_by_topic_and_time(
    client: Any, broker: AnyBroker
) -> None:
    """Also the rest of a batch of which one was; the rest stays."""
    admin = client.admin()
    if not broker.has_extensions:
        assert admin.cancel_scheduled("test") == 0
        return
    start = schedule(client)
    producer = client.producer()
    more = producer.send_many("test", [b"x", b"y", b"z"], deliver_at=start)
    assert producer.cancel(more[1])
    assert admin.cancel_scheduled("test", until=start + HOUR) == 5
    assert admin.scheduled("test").message_count == 1
    assert admin.cancel_scheduled("test", until=start + HOUR) == 0
    assert admin.cancel_scheduled("test") == 1
    assert admin.scheduled().message_count == 1


def test_a_topic_that_is_unknown_is_named(client: Any) -> None:
    """One for which nothing waits is another thing."""
    admin = client.admin()
    for call in (admin.scheduled, admin.cancel_scheduled):
        with pytest.raises(NoTopicError, match=r"'tes'; .* test"):
            call("tes")
    assert admin.scheduled("test").message_count == 0
    assert admin.cancel_scheduled("test") == 0


@pytest.mark.slow
def test_a_deleted_topic_takes_along_what_waits_for_it(
    client: Any, broker: AnyBroker
) -> None:
    """The call says how many messages that were; those of others stay."""
    admin = client.admin()
    if not broker.has_extensions:
        return  # it deletes no topic
    schedule(client)
    admin.create_topic("new", partitions=1)
    assert admin.delete_topic("new") == 0
    admin.create_topic("new", partitions=1)
    client.producer().send_many("new", [b"a", b"b"], delay="1h")
    assert admin.delete_topic("new") == 2
    assert admin.scheduled().message_count == 5


@pytest.mark.slow
def test_a_partition_whose_broker_is_away_is_a_problem_of_a_listing(
    client: Any, broker: AnyBroker
) -> None:
    """Messages may wait there; to take back all of them does not succeed."""
    if not broker.has_extensions:
        return  # nothing waits there
    admin, away = client.admin(), ("test/0-0: its broker is away",)
    assert admin.scheduled("test").problems == ()
    broker.stop()
    wait_until(lambda: admin.scheduled("test").problems == away)
    (problem,) = admin.scheduled().problems
    assert problem == "broker 0 is away, with its scheduled messages"
    with pytest.raises(PartitionsAwayError, match="test/0-0"):
        admin.cancel_scheduled("test")
    broker.start()


GOOD = (
    '{"count": 2, "bytes": 50, "hours": [[3600000, 2]], "first": [{"due": 3600005,'
    ' "topic": "t", "partition": -1, "count": 2, "tier": 1, "offset": 7, "id": 9,'
    ' "more": 1}], "more": []}'
)


def test_a_listing_is_read_as_brokers_write_it() -> None:
    """Fields of later brokers are ignored."""
    found = parse_listing(GOOD, BrokerId(3))
    batch = ScheduledBatch(
        TopicPartition("t", BrokerId(3), -1),
        Millis(3_600_005),
        2,
        1,
        Offset(7),
        MessageId(9),
    )
    assert found == (2, 50, {3_600_000: 2}, (batch,), ())
    lacks = GOOD.replace('"more": []', '"problems": ["a tier is not read"]')
    assert parse_listing(lacks, BrokerId(3)).problems == ("a tier is not read",)
    assert batch.due == dt.datetime(1970, 1, 1, 1, 0, 0, 5000, tzinfo=dt.UTC)


@given(
    st.text(max_size=50)
    | st.builds(
        lambda cut, put: GOOD[:cut] + put + GOOD[cut + 1 :],
        st.integers(0, len(GOOD)),
        st.text(max_size=3),
    )
)
def test_any_other_text_is_read_or_refused(text: str) -> None:
    """Never another error."""
    try:
        found = parse_listing(text, BrokerId(0))
    except BadReplyError:
        return
    assert isinstance(found.message_count, int)
