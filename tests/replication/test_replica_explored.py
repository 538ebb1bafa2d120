"""Sets of three replicas, explored: every order of events to a depth, and walks beyond.

Each area has faults of its own, because all of them together have too many orders for
any depth that matters. The walks mix them, and end with all replicas up again: then a
leader commits the start of its epoch, and all others join it.
"""

from typing import Any

import pytest

from tests.replication.explorer import explore, heal, may_heal, replay, walk
from tests.replication.set_model import Config
from tests.replication.set_moves import SetMoves
from tests.sampling import IS_QUICK, IS_WHOLE, SEED

AREAS: dict[str, dict[str, Any]] = {
    "crash": {"puts": 2, "crashes": 1},
    "two-elections": {"puts": 1, "claims": 2, "crashes": 1},
    "expiry": {"expiries": 1, "shrinks": 1, "unknown": 1},
    "members": {"shrinks": 1, "expansions": 1, "crashes": 1, "in_sync": (1, 2)},
    "late": {"puts": 2, "crashes": 1, "late": 1},
    "early": {"puts": 2, "crashes": 1, "is_early": True},
    "early-hand-over": {"handovers": 1, "expiries": 1, "is_early": True},
    "early-join": {"crashes": 2, "late": 1, "is_early": True},
    "wipe": {"crashes": 2, "wipes": 1},
    "roll-back": {"crashes": 2, "rolls": 1},
    "cut-tail": {"crashes": 2, "tears": 1},
    "cut-tail-of-two": {"crashes": 2, "tears": 1, "in_sync": (1, 2), "is_empty": True},
    "force": {"crashes": 1, "forces": 1},
    "set-back": {"shrinks": 1, "restores": 1},
    "settings": {"shrinks": 1, "crashes": 1, "settings": 1},
    "retention": {"puts": 2, "crashes": 1, "trims": 1},
    "new-log": {"logs": 2, "crashes": 1, "births": 1},
    "two-logs": {"logs": 2, "puts": 2, "crashes": 1},
    "hand-over": {"handovers": 1, "give_ups": 1, "unknown": 1},
    "repeat": {"crashes": 1, "repeats": 1, "refusals": 1},
    "stale-read": {"crashes": 1, "stale": 1},
    "init": {"in_sync": (1,), "is_empty": True, "crashes": 1, "expansions": 2},
    "stop": {"crashes": 1, "stops": 1, "backups": 1, "in_sync": (1, 2)},
}
STATES_MAX = 150_000 if IS_WHOLE else 500 if IS_QUICK else 4_000

MIXED: dict[str, Any] = {
    "is_led": True,
    "is_early": True,
    "logs": 2,
    "puts": 4,
    "claims": 3,
    "crashes": 4,
    "expiries": 2,
    "shrinks": 2,
    "expansions": 3,
    "late": 3,
    "unknown": 2,
}
WALKS: dict[str, dict[str, Any]] = {
    "no-disk-fault": {},
    "two-of-three": {"in_sync": (1, 2), "is_empty": True, "births": 1},
    "one-of-three": {"in_sync": (1,), "is_empty": True, "is_led": False},
    "wipe": {"wipes": 1, "repeats": 2},
    "roll-back": {"rolls": 1, "trims": 2},
    "cut-tail": {"tears": 1, "is_wide": True},
    "force": {"forces": 1, "refusals": 1},
    "set-back": {"restores": 1},
    "set-back-again": {"restores": 2, "claims": 4, "tears": 1},
    "settings": {"settings": 2, "tears": 1},
    "new-log": {"births": 2, "stale": 3},
    "hand-over": {"handovers": 2, "give_ups": 1},
    "retention": {"trims": 3, "is_wide": True, "handovers": 1},
    "stop": {"stops": 3, "backups": 2},
    "stop-and-set-back": {"stops": 2, "backups": 1, "restores": 1},
    "stop-and-wipe": {"stops": 2, "backups": 1, "wipes": 1, "in_sync": (1, 2)},
}
CHUNKS = 4 if IS_WHOLE else 1
WALKS_EACH = 2_100 if IS_WHOLE else 10 if IS_QUICK else 60
STEPS = 60


@pytest.mark.slow
@pytest.mark.sampled(6)
@pytest.mark.parametrize("area", AREAS)
def test_no_order_of_events_breaks_an_invariant(area: str) -> None:
    """Breadth-first over all orders, to the depth that is printed."""
    config = Config(**{"puts": 1, "claims": 1, "is_led": True, **AREAS[area]})
    found = explore(config, states_max=STATES_MAX)
    print(f"{area}: {found}")
    assert not found.violation, str(found)
    assert found.states > 400, str(found)


@pytest.mark.slow
@pytest.mark.sampled(6)
@pytest.mark.parametrize("chunk", range(CHUNKS))
@pytest.mark.parametrize("area", WALKS)
def test_no_walk_breaks_an_invariant_and_all_get_well(area: str, chunk: int) -> None:
    """A leader commits its epoch start, and all join, when nothing fails any more."""
    config = Config(**{**MIXED, **WALKS[area]})
    acked = 0
    for number in range(WALKS_EACH):
        world = walk(config, f"{SEED}.{area}.{chunk}.{number}", steps=STEPS)
        acked += len(world.acked)
        if may_heal(world):
            acked += len(heal(config, world).acked)
    assert acked, "no put was acknowledged"


def test_the_last_complete_member_leads_again_after_a_clean_stop() -> None:
    """Of the others one is out, and one has lost its disk; after a kill an operator has
    to decide, for its directory may be an older state of itself."""
    config = Config(is_led=True, crashes=2, wipes=1, shrinks=1, stops=1)
    before = "crash 3; wipe 3; take out 1 2; answer 1; put 1 0"
    for end, leads in (("leave 1; close 1", True), ("crash 1; session over 1", False)):
        events = f"{before}; {end}; start 1; start 3"
        world = replay(config, events.split("; "))
        assert world.zk.record.in_sync == {1, 3}
        assert (SetMoves(config).claim(world, 1) is not world) is leads
        if leads:
            heal(config, world)


def test_a_leader_that_did_not_know_better_has_its_puts_after_a_restore() -> None:
    """It goes on where ZooKeeper was set back to before a member came, of which only
    that member knows: what is put then is not at the member."""
    config = Config(is_led=True, shrinks=1, expansions=1, unknown=1, restores=1)
    events = (
        "take out 1 3; answer 1; read 2; ack 2 1; read 3; ack 3 1; take in 1 3;"
        " lands unanswered 1; read 3; ZooKeeper set back 2; session 1; answer 1;"
        " put 1 0; pull 2 1; session 3; restore"
    )
    world = replay(config, events.split("; "))
    assert world.acked
    assert world.zk.record.in_sync == {1, 2}
    heal(config, world)


def test_a_claim_in_a_record_that_was_set_back_is_void_if_none_has_led_by_it() -> None:
    """Two claims have one number: replica 3 has led by its own, and 2 goes on."""
    config = Config(is_led=True, expiries=1, restores=1, claims=2)
    before = "expire 1; read 3; claim 3; answer 3; lead 3; session 1; read 1; join 1 3"
    after = "read 2; session 2; claim 2; answer 2; session 1; session 3"
    events = f"{before}; put 3 0; pull 1 3; ZooKeeper set back 1; {after}"
    world = replay(config, events.split("; "))
    claimed = world.zk.record
    assert (claimed.leader, claimed.epoch.number) == (2, 3)
    world = replay(config, f"{events}; restore".split("; "))
    assert world.zk.record.in_sync == {2, 3}
    assert claimed.epoch in [claim.epoch for claim in world.zk.record.claims]
    world = heal(config, world)
    assert 1 in world.disks[1].logs[0].data


def test_a_void_claim_says_whom_the_leader_before_it_waited_for() -> None:
    """It went on where a later member was not known, and acknowledged without it."""
    faults: dict[str, Any] = {"unknown": 1, "restores": 1, "expiries": 1, "give_ups": 1}
    config = Config(is_led=True, shrinks=1, expansions=1, **faults)
    events = (
        "take out 1 3; answer 1; read 2; ack 2 1; read 3; ack 3 1; take in 1 3;"
        " lands unanswered 1; read 3; ZooKeeper set back 2; session 1; answer 1;"
        " put 1 0; pull 2 1; session 2; expire 1; read 2; claim 2; answer 2;"
        " give up 2; answer 2; session 3; restore"
    )
    world = replay(config, events.split("; "))
    assert world.acked
    assert world.zk.record.in_sync == {1, 2}
    heal(config, world)
