"""Definitions that come from ZooKeeper, or from the copy, or stay as they were."""

from dataclasses import dataclass, field, replace
from pathlib import Path

from metaq.broker.followed_definitions import FollowedDefinitions
from metaq.zk.definitions import decode_copy
from metaq.zk.group_definitions import (
    QueueGroupDefinition,
    decode_group,
    encode_group,
)

ONE = QueueGroupDefinition(topic="a")
OTHER = QueueGroupDefinition(topic="b")
OVER = QueueGroupDefinition(topic="a", is_deleted=True)


@dataclass
class Found:
    """A watch that a test fills."""

    values: dict[str, QueueGroupDefinition | str] = field(default_factory=dict)
    is_complete: bool = False

    def cancel(self) -> None:
        pass


def followed() -> tuple[
    FollowedDefinitions[QueueGroupDefinition | str, QueueGroupDefinition], Found
]:
    kind = FollowedDefinitions[QueueGroupDefinition | str, QueueGroupDefinition](
        "queue group",
        "write it again",
        Path("copy"),
        encode_group,
        lambda each: each,
        lambda each: each.generation,
    )
    kind.watch = found = Found()
    return kind, found


def test_the_copy_counts_until_zookeeper_was_read() -> None:
    """And what was read is what the next copy has."""
    kind, found = followed()
    kind.values = {"g": ONE}
    assert not kind.refresh()
    assert kind.values == {"g": ONE}
    found.values, found.is_complete = {"g": OTHER}, True
    assert kind.refresh()
    assert not kind.refresh()
    assert decode_copy(kind.encode(), decode_group) == {"g": OTHER}


def test_what_cannot_be_read_or_is_gone_stays_with_a_sentence() -> None:
    """A deleted one goes."""
    kind, found = followed()
    kind.values = {"g": ONE, "lost": OTHER, "over": OVER}
    found.values, found.is_complete = {"g": "no JSON"}, True
    assert kind.refresh()
    assert kind.values == {"g": ONE, "lost": OTHER}
    assert kind.active().keys() == {"g", "lost"}
    unread, gone = kind.problems
    assert unread == (
        "definition of queue group 'g' cannot be read, and the previous one stays in"
        " effect on this broker: no JSON"
    )
    assert not kind.unread
    assert gone.endswith("stays in effect on this broker: write it again")
    found.values = {"g": OVER, "lost": OTHER}
    assert kind.refresh()
    assert kind.active() == {"lost": OTHER}
    assert not kind.problems


def test_one_of_an_earlier_generation_is_not_taken_for_another_one() -> None:
    """ZooKeeper has lost the later one, which stays; but for one that was deleted."""
    kind, found = followed()
    second = replace(ONE, generation=2)
    kind.values = {"g": second}
    found.is_complete = True
    assert not kind.refresh()
    assert kind.lost == ("g",)
    found.values = {"g": ONE}
    assert not kind.refresh()
    assert (kind.values, kind.lost) == ({"g": second}, ("g",))
    assert "is of an earlier generation" in kind.problems[0]
    found.values = {"g": replace(ONE, generation=3)}
    assert kind.refresh()
    assert (kind.values, kind.lost, kind.problems) == (found.values, (), ())
    kind.values = {"g": replace(OVER, generation=2)}
    found.values = {"g": ONE}
    assert kind.refresh()
    assert (kind.values, kind.lost) == ({"g": ONE}, ())


def test_what_was_never_read_is_left_out_with_a_sentence() -> None:
    """A user of it hears why; one with more than is known is in effect without that."""
    kind, found = followed()
    kind.values = {"over": OVER}
    newer = replace(ONE, others={"priority": 1, "limit": 2})
    found.values = {"g": "a newer version", "over": "likewise", "more": newer}
    found.is_complete = True
    assert kind.refresh()
    assert kind.active() == {"more": newer}
    assert kind.unread == {
        "g": "its definition cannot be read: a newer version",
        "over": "its definition cannot be read: likewise",
    }
    left_out, _, more = kind.problems
    assert left_out == (
        "definition of queue group 'g' cannot be read, and it is left out on this"
        " broker: a newer version"
    )
    assert more.endswith("is in effect on this broker without limit, priority")
    found.values = {}
    assert kind.refresh()
    assert not kind.unread
