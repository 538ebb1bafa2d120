"""Decisions of a broker about definitions: one table, without a broker."""

from dataclasses import replace
from typing import Any

import pytest

from metaq.broker.defined_topics import Decisions, decide
from metaq.config.load import parse_config
from metaq.config.settings import BrokerConfig
from metaq.model import BrokerId
from metaq.zk.definitions import Effect, TopicDefinition, TopicState, TopicStatus

CONFIG = parse_config(
    b"[system]\nbrokerId=3\nnumPartitions=1\nunflushThreshold=0\n"
    b"unflushInterval=1\nmaxSegmentSize=1024\nmaxTransferSize=1024\n"
    b"[zookeeper]\nzk.zkEnable=false\n[topic=mine]\nnumPartitions=7\n",
    "server.ini",
)
ACTIVE = TopicDefinition(partitions=4)
OLDER = TopicDefinition(partitions=2)
GOING = replace(ACTIVE, state=TopicState.DELETING)
ELSEWHERE = replace(ACTIVE, brokers=(BrokerId(0),))
WRONG = replace(ACTIVE, settings={"deletePolcy": "delete,1"})
BAD_TIME = replace(ACTIVE, settings={"deleteWhen": "tomorrow"})


def decided(
    found: TopicDefinition | str | None,
    before: TopicDefinition | None = None,
    *,
    topic: str = "t",
    is_read: bool = True,
    config: BrokerConfig = CONFIG,
    logs: tuple[str, ...] = (),
    removed: tuple[str, ...] = (),
) -> Decisions:
    lies_there = {} if found is None else {topic: found}
    return decide(
        lies_there if is_read else None,
        {} if before is None else {topic: before},
        config,
        has_log=logs.__contains__,
        removed=removed,
    )


def told(outcome: Decisions) -> dict[str, TopicStatus]:
    """Return what is told of other topics than that of the file."""
    return {t: status for t, status in outcome.statuses.items() if t != "mine"}


def status_of(definition: TopicDefinition, effect: Effect, text: str = "") -> Any:
    status = TopicStatus(definition=definition.checksum, effect=effect, text=text)
    return {"t": status}


def test_a_definition_is_in_effect_on_the_brokers_it_names() -> None:
    """With its settings, and said to be so."""
    outcome = decided(ACTIVE)
    assert outcome.defined["t"].partition_count == 4
    assert told(outcome) == status_of(ACTIVE, Effect.IN_EFFECT)
    assert outcome.accepted == {"t": ACTIVE}
    assert not outcome.deleting | outcome.refused
    assert outcome.problems == ()


def test_a_topic_that_is_closed_to_some_says_so() -> None:
    """A command waits for those alone that it is open to."""
    hidden = replace(ACTIVE, settings={"acceptPublish": "false"})
    status = told(decided(hidden))["t"]
    assert (status.takes_puts, status.gives_gets) == (False, True)
    assert status.text == "takes no puts"
    hidden = replace(
        ACTIVE, settings={"acceptPublish": "false", "acceptSubscribe": "false"}
    )
    status = told(decided(hidden))["t"]
    assert (status.takes_puts, status.gives_gets) == (False, False)
    assert status.text == "takes no puts, gives no gets"


def test_a_broker_that_is_not_named_only_gives_what_it_has() -> None:
    """Readers may still want it; new messages go elsewhere."""
    assert decided(ELSEWHERE).defined == {}
    outcome = decided(ELSEWHERE, logs=("t",))
    assert not outcome.defined["t"].accept_publish
    assert outcome.defined["t"].accept_subscribe
    assert told(outcome) == {}
    assert outcome.accepted == {"t": ELSEWHERE}


def test_a_section_is_told_where_there_is_no_definition() -> None:
    """So that a command knows where a topic comes from; patterns are no topics."""
    config = parse_config(CONFIG.data + b"[topic=wild-*]\n", "server.ini")
    statuses = decided(None, config=config).statuses
    assert statuses == {
        "mine": TopicStatus(definition=0, effect=Effect.OVERRIDDEN, text="server.ini")
    }


def test_a_section_wins_and_the_file_is_named() -> None:
    """The definition is remembered: the section may go with a reload."""
    outcome = decided(ACTIVE, topic="mine")
    status = outcome.statuses["mine"]
    assert (status.effect, status.text) == (Effect.OVERRIDDEN, "server.ini")
    assert outcome.accepted == {"mine": ACTIVE}


@pytest.mark.parametrize(
    ("definition", "wanted"),
    [
        (WRONG, "Invalid config key:deletePolcy,do you mean 'deletePolicy'"),
        (BAD_TIME, "topic 't' deleteWhen: schedule 'tomorrow': expected 6 or 7"),
    ],
)
def test_what_cannot_be_is_refused_and_the_old_stays(
    definition: TopicDefinition, wanted: str
) -> None:
    """It is said in the status, and is a problem."""
    outcome = decided(definition, OLDER)
    assert outcome.statuses["t"].effect is Effect.REFUSED
    assert wanted in outcome.statuses["t"].text
    assert wanted in outcome.problems[0]
    assert outcome.accepted == {"t": OLDER}
    assert outcome.defined["t"].partition_count == 2
    assert outcome.refused == frozenset()


def test_a_first_definition_that_is_refused_leaves_the_settings_unknown() -> None:
    """Messages of the topic must not age by other settings."""
    outcome = decided(WRONG, logs=("t",))
    assert (outcome.defined, outcome.accepted) == ({}, {})
    assert outcome.refused == {"t"}


def test_what_cannot_be_read_is_a_problem_and_no_missing_topic() -> None:
    """The old one stays, and an unreadable definition has no status."""
    outcome = decided("topic definition: expected JSON, got 'x'", OLDER)
    assert outcome.accepted == {"t": OLDER}
    assert outcome.defined["t"].partition_count == 2
    assert told(outcome) == {}
    (problem,) = outcome.problems
    assert problem.startswith("definition of topic 't' cannot be read: topic def")


def test_zookeeper_that_was_never_read_changes_nothing() -> None:
    """The accepted definition is judged again, under the present settings."""
    outcome = decided(None, ACTIVE, is_read=False)
    assert outcome.accepted == {"t": ACTIVE}
    assert outcome.defined["t"].partition_count == 4
    assert decided(None, GOING, is_read=False).deleting == {"t"}


def test_a_definition_that_is_gone_stays_as_long_as_there_is_data() -> None:
    """Its retention was not ended; it is a problem, with a remedy."""
    outcome = decided(None, ACTIVE, logs=("t",))
    assert outcome.accepted == {"t": ACTIVE}
    assert outcome.defined["t"].partition_count == 4
    assert "is missing in ZooKeeper" in outcome.problems[0]
    words = "metaq topics alter t --brokers all"
    assert outcome.problems[0].endswith(words)
    outcome = decided(None, ACTIVE)
    assert (outcome.accepted, outcome.defined, outcome.problems) == ({}, {}, ())


def test_the_remedy_of_a_definition_that_is_gone_has_its_settings() -> None:
    """Without them the topic went back to the defaults, with an age of its messages."""
    settings = {"deletePolicy": "delete,720h", "deleteWhen": "0 0 6 * * ?"}
    definition = replace(ACTIVE, brokers=(BrokerId(0), BrokerId(2)), settings=settings)
    (problem,) = decided(None, definition, logs=("t",)).problems
    assert problem.endswith(
        "metaq topics alter t --brokers 0,2 --set deletePolicy=delete,720h"
        " --set 'deleteWhen=0 0 6 * * ?'"
    )


def test_a_topic_that_is_to_be_deleted_is_not_served() -> None:
    """From the moment on when it is remembered; even if its settings make no sense."""
    for definition in (GOING, replace(WRONG, state=TopicState.DELETING)):
        outcome = decided(definition, ACTIVE, logs=("t",))
        assert outcome.deleting == {"t"}
        assert outcome.defined == {}
        assert outcome.accepted == {"t": definition}
        assert told(outcome) == {}


def test_a_deletion_is_forgotten_when_it_is_done_and_the_definition_gone() -> None:
    """Not before: what is left of it would be served after a restart."""
    assert decided(None, GOING).deleting == {"t"}
    outcome = decided(None, GOING, removed=("t",))
    assert (outcome.deleting, outcome.accepted) == (frozenset(), {})
    assert decided(GOING, GOING, removed=("t",)).deleting == {"t"}
    assert decided(ACTIVE, GOING, removed=("t",)).defined.keys() == {"t"}


def test_a_topic_of_server_ini_is_not_deleted() -> None:
    """It says so, and goes on; a deletion that has begun is finished."""
    outcome = decided(GOING, ACTIVE, topic="mine")
    assert outcome.deleting == frozenset()
    assert outcome.statuses["mine"].effect is Effect.OVERRIDDEN
    assert "topic 'mine' is not deleted: server.ini defines it" in outcome.problems
    assert decided(GOING, GOING, topic="mine").deleting == {"mine"}
