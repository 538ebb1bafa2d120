"""Facts of a replica: one line of JSON, and back."""

import pytest

from metaq.replication.facts import (
    FollowerLag,
    HeldLog,
    ReplicaFacts,
    decode_facts,
    encode_facts,
    logs_of,
)
from metaq.replication.record import ReplicaSetError, make_record

RECORD = make_record("s", 1, frozenset({1, 2}), min_in_sync=2, nonce="n")


def test_facts_come_back_as_they_were() -> None:
    """With and without a record, in the frame of `stats`."""
    facts = ReplicaFacts(
        replica=2,
        role="leading",
        reason="",
        completed=4,
        record=RECORD,
        lag=(FollowerLag(1, "in sync", True, 30, 0.5),),
        logs=(HeldLog("test-0", 7, 0, 90, 60),),
    )
    text = f"STATS\r\n{encode_facts(facts)}\r\nEND\r\n"
    assert decode_facts(text) == facts
    bare = ReplicaFacts(1, "starting", "away", 0, None)
    assert decode_facts(f"STATS\r\n{encode_facts(bare)}\r\nEND\r\n") == bare
    assert logs_of({}) == ()


def test_stats_of_another_broker_are_no_facts() -> None:
    """One that is in no set answers as it would for a topic of that name."""
    with pytest.raises(ReplicaSetError, match="stats"):
        decode_facts("STATS\r\nreplica\r\nresultCode 1\r\nEND\r\n")
