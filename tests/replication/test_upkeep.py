"""Upkeep of a set by its leader: who goes, who comes, what is refused or in doubt."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from metaq.model import LogId, Offset
from metaq.replication.election import Flag, Presence, PresenceState
from metaq.replication.progress import Leadership, Quorum
from metaq.replication.record import Purpose, make_record
from metaq.replication.replica import Replica, ReplicaRole, SetFile
from metaq.replication.upkeep import (
    WaitingPuts,
    can_others_lead,
    change_set,
    refuses_puts,
    successor,
)

ALL = frozenset({1, 2, 3})
NOBODY: frozenset[int] = frozenset()


def present(*replicas: int, flags: dict[int, Flag] | None = None):
    ready, kept = PresenceState.READY, flags or {}
    return tuple(Presence(k, 1, ready, 2, 2, kept.get(k, Flag.NONE)) for k in replicas)


def leader(in_sync: frozenset[int] = ALL, *, minimum: int = 2) -> Replica:
    made = make_record("s", 1, ALL, min_in_sync=minimum, nonce="init")
    record = replace(made, in_sync=in_sync).at(2, "a", leader=1)
    lives = ((2, 1), (3, 1))
    term = Leadership(record.epoch, Quorum(1, in_sync, minimum), lives)
    file = SetFile("s", 1, record, 2, 2)
    return Replica(ReplicaRole.LEADING, file, 5, 1, term=term)


def due(replica: Replica, presences, **events: Any):
    """Return the in-sync set after the change that is due, or None."""
    known = {"stalled": NOBODY, "lost": NOBODY, "caught_up": NOBODY, **events}
    transition = change_set(replica, presences, **known)
    if transition is None:
        return None
    pending = transition[0].pending
    assert pending is not None
    return pending.purpose, pending.record.in_sync


def test_a_member_that_is_silent_or_away_goes() -> None:
    """As long as the minimum remains without it."""
    gone = Purpose.TAKE_OUT, frozenset({1, 2})
    assert due(leader(), present(1, 2, 3)) is None
    assert due(leader(), present(1, 2, 3), stalled=frozenset({3})) == gone
    assert due(leader(), present(1, 2)) == gone
    pair = leader(frozenset({1, 2}))
    assert due(pair, present(1, 2, 3), stalled=frozenset({2})) is None


def test_a_member_that_lacks_bytes_goes_before_one_that_is_late() -> None:
    """Only one of them may go, and the other one has all bytes."""
    events = {"stalled": frozenset({2}), "lost": frozenset({3})}
    assert due(leader(), present(1, 2, 3), **events) == (
        Purpose.TAKE_OUT,
        frozenset({1, 2}),
    )
    flagged = present(1, 2, 3, flags={3: Flag.INCOMPLETE})
    assert due(leader(), flagged, stalled=frozenset({2})) == (
        Purpose.TAKE_OUT,
        frozenset({1, 2}),
    )


def test_a_replica_that_has_caught_up_comes_in() -> None:
    """While it is there, and goes on pulling; then a dead member may go."""
    pair = leader(frozenset({1, 2}))
    came = Purpose.TAKE_IN, ALL
    assert due(pair, present(1, 2, 3), caught_up=frozenset({3})) == came
    assert due(pair, present(1, 2), caught_up=frozenset({3})) is None
    late = {"caught_up": frozenset({3}), "stalled": frozenset({3})}
    assert due(pair, present(1, 2, 3), **late) is None
    # Two is dead and stays at the minimum, until three has come.
    assert due(pair, present(1, 3), caught_up=frozenset({3})) == came


def test_puts_that_will_wait_are_refused() -> None:
    """A member is silent, shows that it lacks bytes, or there are too few."""
    assert not refuses_puts(leader(), present(1, 2, 3), NOBODY)
    assert refuses_puts(leader(), present(1, 2, 3), frozenset({2}))
    assert refuses_puts(leader(), present(1, 2), NOBODY)
    assert refuses_puts(leader(frozenset({1})), present(1, 2, 3), NOBODY)
    flagged = present(1, 2, 3, flags={2: Flag.INCOMPLETE})
    assert refuses_puts(leader(), flagged, NOBODY)
    assert refuses_puts(replace(leader(), term=None), present(1, 2, 3), NOBODY)


def test_a_leader_hands_over_where_others_can_lead() -> None:
    """They are the minimum without it, and one of them is a member."""
    assert can_others_lead(leader(), present(1, 2, 3))
    assert not can_others_lead(leader(), present(1, 2))
    assert not can_others_lead(leader(frozenset({1})), present(1, 2, 3))
    assert successor(leader(), present(1, 2, 3)) == 2
    assert successor(leader(), present(1, 3)) == 3
    assert successor(leader(), present(1)) == 0


def test_a_put_that_waits_for_the_lag_time_ends_in_doubt() -> None:
    """Not earlier, once, and only what was in flight then."""
    ended: list[Offset] = []
    log_id = LogId("test", 0)
    log: Any = SimpleNamespace(high_watermark=Offset(0), next_offset=Offset(10))
    log.log_id, log.end_in_doubt = log_id, lambda _cause, *, until: ended.append(until)
    logs = {log_id: log}
    waiting = WaitingPuts(lag_s=4.0)
    waiting.check(logs, 0.0)
    log.next_offset = Offset(30)
    waiting.check(logs, 3.0)
    assert not ended
    waiting.check(logs, 4.1)
    assert ended == [10]
    waiting.check(logs, 6.0)
    assert ended == [10]
    waiting.check(logs, 8.2)
    assert ended == [10, 30]
    log.high_watermark = Offset(30)
    waiting.check(logs, 13.0)
    assert ended == [10, 30]
