"""The record of a set: its bytes, and what may be changed in it."""

import json
from dataclasses import replace
from typing import Any

import pytest

from metaq.replication.epochs import Epoch
from metaq.replication.record import (
    CLAIMS_KEPT,
    RESTORE_STEP,
    LeaderNode,
    ReplicaSetError,
    SetRecord,
    decode_record,
    encode_record,
    foreign_reason,
    make_record,
    plan_claim,
    plan_force,
    plan_give_up,
    plan_register,
    plan_settings,
    plan_take_in,
    plan_take_out,
    restored_record,
)
from tests.cases import for_each

ALL = frozenset({1, 2, 3})
FIRST = make_record("s", 1, ALL, min_in_sync=2, nonce="init")
WHOLE = replace(FIRST, in_sync=ALL)
LED = WHOLE.at(2, "a", leader=1)
GOOD = json.loads(encode_record(LED))


def test_a_record_is_one_text() -> None:
    """The bytes of the node, which other versions read as well."""
    assert encode_record(LED) == (
        b'{"set_id":"s","revision":2,"epoch":[2,"a"],"leader":1,"in_sync":[1,2,3],'
        b'"replicas":[1,2,3],"min":2,"forced":[],'
        b'"claims":[[[1,"init"],1],[[2,"a"],2]],"target":0}'
    )
    assert decode_record(encode_record(LED)) == LED


def test_properties_of_later_versions_are_left_out() -> None:
    """A set is led by replicas of two versions while it is updated."""
    fields = json.loads(encode_record(LED)) | {"later": 1}
    assert decode_record(json.dumps(fields).encode()) == LED


@for_each(
    "fields, text",
    {
        "not JSON": (b"{", "expected JSON"),
        "no object": (b"[]", "expected an object"),
        "of another kind": (GOOD | {"min": "2"}, "min: expected 0 to .*, got '2'"),
        "a truth for a number": (
            GOOD | {"min": True},
            "min: .* got True",
        ),
        "missing": ({**GOOD, "target": None}, "target: expected 0 to .*, got None"),
        "in_sync of others": (GOOD | {"in_sync": [4]}, r"got \[4\]"),
        "nobody in sync": (GOOD | {"in_sync": []}, r"got \[\]"),
        "no replicas": (GOOD | {"replicas": []}, "expected replicas from 1 to 9"),
        "a minimum above all": (GOOD | {"min": 4}, "expected min from 1 to 3, got 4"),
        "a leader of another set": (GOOD | {"leader": 7}, "leader 7"),
        "an epoch without a claim": (
            GOOD | {"epoch": [9, "a"]},
            "not the last of its",
        ),
        "a claim without revision": (
            GOOD | {"claims": [[2, "a"]]},
            "epoch: expected 2",
        ),
    }.values(),
)
def test_a_record_that_contradicts_itself_is_refused(fields: Any, text: str) -> None:
    """The error names the property and what it is."""
    data = fields if isinstance(fields, bytes) else json.dumps(fields).encode()
    with pytest.raises(ReplicaSetError, match=text):
        decode_record(data)


def test_the_set_never_shrinks_below_the_minimum() -> None:
    """Rule S: as many others remain, ready and without a flag."""
    change = plan_take_out(LED, 5, 3, frozenset({1, 2}))
    assert change is not None
    assert change.record.in_sync == {1, 2}
    assert change.version == 5
    assert change.leader_node is LeaderNode.CHECKED
    assert plan_take_out(change.record, 6, 2, ALL) is None
    assert plan_take_out(LED, 5, 3, frozenset({1})) is None
    assert plan_take_out(LED, 5, 1, ALL) is None


def test_an_incomplete_replica_leaves_when_it_may() -> None:
    """It registers in any case; at the minimum it stays a member that is waited for."""
    left = plan_register(LED, 5, (3, 7), frozenset({1, 2}))
    assert left.record.in_sync == {1, 2}
    assert not left.is_check
    stays = plan_register(LED, 5, (3, 7), frozenset({1}))
    assert stays.is_check
    assert stays.record == LED
    assert plan_register(LED, 5, (3, 7), None).is_check


def test_a_claim_keeps_all_where_too_few_are_there() -> None:
    """One that is away may have what the others lack."""
    some = plan_claim(WHOLE, 5, 2, "b", frozenset({2, 3}))
    assert some is not None
    assert some.record.in_sync == {2, 3}
    alone = plan_claim(WHOLE, 5, 2, "b", frozenset({2}))
    assert alone is not None
    assert alone.record.in_sync == ALL
    assert alone.record.epoch == Epoch(2, "b")
    assert alone.leader_node is LeaderNode.CREATED
    assert plan_claim(replace(WHOLE, in_sync=frozenset({1})), 5, 2, "b", ALL) is None


def test_a_replica_is_taken_in_once_and_if_it_is_one() -> None:
    """The change names the directory with which it joined."""
    record = replace(LED, in_sync=frozenset({1, 2}))
    change = plan_take_in(record, 5, (3, 7))
    assert change is not None
    assert change.member_check == (3, 7)
    assert change.record.in_sync == ALL
    assert plan_take_in(LED, 5, (3, 7)) is None
    assert plan_take_in(record, 5, (4, 7)) is None


def test_a_leader_that_hands_over_names_who_is_next() -> None:
    """The target goes with the next epoch."""
    change = plan_give_up(LED, 5, None, target=2)
    assert change.record.target == 2
    assert change.record.leader == 0
    assert change.leader_node is LeaderNode.DELETED
    claim = plan_claim(change.record, 6, 2, "b", ALL)
    assert claim is not None
    assert claim.record.target == 0


@for_each(
    "changes, text",
    [
        ({"min_in_sync": 3}, "expected 3 in-sync"),
        ({"replicas": frozenset({2, 3})}, "replica 1 leads"),
        ({"replicas": frozenset({1, 3})}, "expected 2"),
        ({"min_in_sync": 0}, "expected min from 1"),
    ],
)
def test_settings_that_break_a_rule_are_refused(
    changes: dict[str, Any], text: str
) -> None:
    """The minimum stays at or below the in-sync set, and a leader is not removed."""
    low = replace(LED, in_sync=frozenset({1, 2}))
    with pytest.raises(ReplicaSetError, match=text):
        plan_settings(low, 5, **changes)


def test_replicas_are_added_and_removed() -> None:
    """Those that are added join later; those that are removed leave the set."""
    low = replace(LED, in_sync=frozenset({1, 2}))
    added = plan_settings(low, 5, replicas=ALL | {4}).record
    assert added.replicas == {1, 2, 3, 4}
    assert plan_settings(LED, 5, replicas=frozenset({1, 2})).record.in_sync == {1, 2}


def test_a_forced_epoch_is_named() -> None:
    """Followers may cut below a high watermark that they knew before it."""
    forced = plan_force(LED, 5, 3, "f").record
    assert forced.forced == (3,)
    assert forced.in_sync == {3}
    assert forced.epoch == Epoch(3, "f")
    with pytest.raises(ReplicaSetError, match="got 4"):
        plan_force(LED, 5, 4, "f")


def later(record: SetRecord, count: int) -> SetRecord:
    for _ in range(count):
        record = record.then()
    return record


TAKEN_OUT = LED.then(in_sync=frozenset({1, 2}))


@for_each(
    "copy, record, text",
    {
        "the same": (LED, LED, ""),
        "later": (LED, later(LED, 3), ""),
        "a later epoch": (TAKEN_OUT, TAKEN_OUT.at(3, "c", leader=2), ""),
        "older": (TAKEN_OUT, LED, "expected revision 3 or more"),
        "another change": (TAKEN_OUT, LED.then(min=1), "another change"),
        "another claim": (LED, later(WHOLE.at(2, "b", leader=2), 3), "none of the"),
        "claimed before the change": (
            TAKEN_OUT,
            later(LED.at(3, "c", leader=3), 3),
            "began at revision 3",
        ),
        "another set": (LED, replace(LED, set_id="t"), "expected set s, got t"),
    }.values(),
)
def test_a_record_that_does_not_follow_from_a_copy_is_foreign(
    copy: SetRecord, record: SetRecord, text: str
) -> None:
    """Set back and changed since: by number alone it would look newer."""
    reason = foreign_reason(copy, record)
    assert text in reason
    assert bool(text) == bool(reason)


def test_old_claims_are_dropped() -> None:
    """A copy that is older than all of them is foreign: nothing shows the contrary."""
    record = LED
    for number in range(3, 3 + CLAIMS_KEPT):
        record = record.at(number, "x")
    assert len(record.claims) == CLAIMS_KEPT
    assert foreign_reason(LED, record)
    assert not foreign_reason(LED.at(3, "x"), record)


def test_a_record_is_restored_from_the_newest_copy() -> None:
    """It is later than all copies and what ZooKeeper has, in numbers and in order."""
    newest = LED.then(in_sync=frozenset({1, 2}))
    copies = {1: newest, 2: LED, 3: LED}
    record = restored_record(copies, LED, completed={}, missing=frozenset(), nonce="r")
    assert record.in_sync == {1, 2}
    assert record.revision == newest.revision + RESTORE_STEP
    assert record.epoch == Epoch(2 + RESTORE_STEP, "r")
    assert record.leader == 0
    assert not any(foreign_reason(copy, record) for copy in copies.values())


def test_members_of_a_restored_set_were_in_sync_before_and_after() -> None:
    """A leader that finds ZooKeeper set back goes on with the in-sync set it finds."""
    found = LED.then(in_sync=frozenset({1, 2}))
    copies = {1: found, 2: LED, 3: found.then().then(in_sync=frozenset({2, 3}))}
    record = restored_record(
        copies, found, completed={}, missing=frozenset(), nonce="r"
    )
    assert record.in_sync == {2}
    knowing = {**copies, 1: found.then()}
    record = restored_record(
        knowing, found, completed={}, missing=frozenset(), nonce="r"
    )
    assert record.in_sync == {2, 3}
    del copies[2]
    record = restored_record(
        copies, found, completed={}, missing=frozenset({2}), nonce="r"
    )
    assert record.in_sync == {2, 3}


def test_nobody_is_left_out_of_a_restore_unnamed() -> None:
    """A replica that is away may have the newest copy."""
    copies = {1: LED, 2: LED}
    with pytest.raises(ReplicaSetError, match=r"replicas \[3\] have not reported"):
        restored_record(copies, None, completed={}, missing=frozenset(), nonce="r")
    record = restored_record(
        copies, None, completed={}, missing=frozenset({3}), nonce="r"
    )
    assert record.in_sync == ALL
    with pytest.raises(ReplicaSetError, match="got none"):
        restored_record({}, None, completed={}, missing=ALL, nonce="r")


def test_copies_of_two_histories_are_not_merged() -> None:
    """An operator stops the replicas of one, and goes on without them."""
    fork = {1: LED.then(min=1), 2: LED.at(3, "b", leader=2), 3: LED}
    with pytest.raises(ReplicaSetError, match="two histories"):
        restored_record(fork, LED, completed={}, missing=frozenset(), nonce="r")
    del fork[2]
    record = restored_record(fork, LED, completed={}, missing=frozenset({2}), nonce="r")
    assert record.min == 1


LATER = LED.at(3, "c", leader=3, in_sync=frozenset({1, 3})).then(in_sync=ALL)
VOID = LED.at(3, "b", leader=2, in_sync=frozenset({2, 3}))
"""Claimed by replica 2, which knew `LED`, where ZooKeeper was set back to it."""
FORK = {1: LATER, 2: VOID, 3: LATER}


@for_each(
    "found, void",
    {
        "landed": (VOID, VOID),
        "given up": (VOID.then(leader=0), VOID.then(leader=0)),
        "a greater number": (None, VOID.at(4, "d", leader=2)),
        "set back again": (LED, VOID),
    }.values(),
)
def test_a_claim_that_none_has_led_by_is_void(
    found: SetRecord | None, void: SetRecord
) -> None:
    """Its replica follows again; of the members those stay that it had, too."""
    copies = FORK | {2: void}
    completed = {1: 3, 2: 2, 3: 3}
    record = restored_record(
        copies, found, completed=completed, missing=frozenset(), nonce="r"
    )
    assert record.fault() is None
    assert record.in_sync == {2, 3}
    assert record.leader == 0
    assert record.epoch.number > 3 + RESTORE_STEP - 1
    assert not any(foreign_reason(copy, record) for copy in copies.values())
    assert not foreign_reason(LED, record)


@for_each(
    "copies, completed",
    {
        "it was led by": (FORK, {1: 3, 2: 3, 3: 3}),
        "a flag": (FORK, {1: 3, 3: 3}),
        "another followed": (
            {1: VOID, 2: VOID, 3: LATER},
            {1: 3, 2: 2, 3: 3},
        ),
        "changed before it": (
            FORK | {2: later(LED, 2).at(3, "b", leader=2)},
            {1: 3, 2: 2, 3: 3},
        ),
        "no common member": (
            FORK
            | {2: LED.at(3, "b", leader=2, in_sync=frozenset({2}))}
            | {k: replace(LATER, in_sync=frozenset({1, 3})) for k in (1, 3)},
            {1: 3, 2: 2, 3: 3},
        ),
        "one is away": ({2: VOID, 3: LATER}, {2: 2, 3: 3}),
    }.values(),
)
def test_a_claim_that_may_have_been_led_by_is_another_history(
    copies: dict[int, SetRecord], completed: dict[int, int]
) -> None:
    """All have to say that nothing came of it, and none may have lost its memory."""
    missing = frozenset({1, 2, 3}) - copies.keys()
    with pytest.raises(ReplicaSetError, match="two histories"):
        restored_record(copies, VOID, completed=completed, missing=missing, nonce="r")


def test_a_set_is_made_with_numbers_in_range() -> None:
    """The minimum is at most the number of replicas, which are from 1 to 9."""
    with pytest.raises(ReplicaSetError, match="expected min from 1 to 3, got 4"):
        make_record("s", 1, ALL, min_in_sync=4, nonce="n")
    with pytest.raises(ReplicaSetError, match="expected replicas from 1 to 9"):
        make_record("s", 1, ALL | {10}, min_in_sync=2, nonce="n")
    assert FIRST.in_sync == {1}
