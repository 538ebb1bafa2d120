"""Routes: partitions of topics, and the choice among them."""

from typing import Any

import pytest

from metaq.client import KeyHash, OutgoingMessage
from metaq.client.partitioner import slot_of
from metaq.client.produce.routes import Routes
from metaq.model import BrokerId, TopicPartition


def test_what_withdraws_partitions_does_not_compare_each_with_all() -> None:
    """A broker that goes takes thousands along; each is hashed a few times."""

    class Counted(TopicPartition):
        hashes = 0

        def __hash__(self) -> int:
            Counted.hashes += 1
            return super().__hash__()

    class Named:
        def __init__(self, partition: TopicPartition, row: int | None) -> None:
            assert row is None
            self.partition = partition

    count = 100
    known = [Counted("test", BrokerId(b), n) for b in (0, 1) for n in range(count)]
    make: Any = Named
    routes = Routes(make, None, first_turn=1)
    assert routes.set_partitions("test", known) == []
    gone = routes.set_partitions("test", known[:count])
    assert [sender.partition for sender in gone] == known[count:]
    assert Counted.hashes <= 20 * len(known)


def test_keys_are_planned_once_for_a_broker_and_once_for_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Sends and transactions that take turns do not plan again each time."""
    planned: list[int] = []

    def plan(partitions: Any) -> list[int]:
        planned.append(len(partitions))
        return [slot % len(partitions) for slot in range(4096)]

    monkeypatch.setattr("metaq.client.partitioner.plan_slots", plan)
    make: Any = lambda partition, row: (partition, row)  # noqa: E731
    routes = Routes(make, KeyHash(), 0)
    partitions = [TopicPartition("t", BrokerId(b), n) for b in (0, 1) for n in (0, 1)]
    routes.set_partitions("t", partitions)
    message = OutgoingMessage(b"", None, "k")
    for _ in range(5):
        anywhere = routes.choose("t", message, None, has_local_keys=False)
        there = routes.choose("t", message, BrokerId(1), has_local_keys=True)
        assert anywhere == partitions[slot_of("k") % 4]
        assert there == partitions[2 + slot_of("k") % 2]
    assert planned == [4, 2]
    assert routes.choose("t", message, BrokerId(7), has_local_keys=True) is None
