"""Rules of a set, each broken by a switch of the model: what happens without it.

Each has a short history that ends in a violation. The same events end in none where the
rule holds.
"""

from typing import Any, NamedTuple

import pytest

from tests.replication.explorer import explore, follow, replay
from tests.replication.set_model import Config, Violation


class Rule(NamedTuple):
    """A rule that is broken, and how that is seen."""

    text: str
    bounds: dict[str, Any]
    history: str


ACKED = "put 1 0; pull 3 1; pull 2 1"
OLD_COPY = f"back up 2; {ACKED}; crash 2; put back 2"
"""A directory of replica 2 comes back that lacks an acknowledged put, under the version
that ZooKeeper has."""
RULES = {
    "a": Rule(
        "a follower cuts at its own high watermark",
        {"crashes": 1},
        "put 1 0; pull 2 1; pull 3 1; crash 1; session over 1; read 3; claim 3;"
        " answer 3; lead 3; read 2; join 2 3",
    ),
    "b": Rule(
        "copies part by one look-up of the last epoch",
        {"crashes": 2, "stops": 1, "claims": 2},
        "put 1 0; leave 1; close 1; crash 3; session over 3; read 2; claim 2;"
        " answer 2; lead 2; put 2 0; crash 2; session over 2; start 1; claim 1;"
        " answer 1; lead 1; start 2; read 2; join 2 1; start 3; read 3; join 3 1;"
        " pull 3 1",
    ),
    "c": Rule(
        "acknowledgements of another epoch count",
        {"stops": 1, "late": 1, "expiries": 1},
        "expire 1; leave 3; close 3; session 1; start 3; put 1 0; pull, ack late 2 1;"
        " claim 3; answer 3; lead 3; put 3 0; read 2; answer 1; read 1; join 2 3;"
        " late ack 2.1>1 e2 1; join 1 3; pull 1 3",
    ),
    "d": Rule(
        "the high watermark does not wait for a member that may have been taken in",
        {"in_sync": (1, 2), "expansions": 1, "unknown": 1},
        "read 3; join 3 1; put 1 0; pull 3 1; take in 1 3; put 1 0;"
        " lands unanswered 1; pull 2 1",
    ),
    "e": Rule(
        "a follower joins at the high watermark, before the epoch start",
        {"in_sync": (1, 2), "crashes": 1, "expansions": 1},
        "put 1 0; pull 2 1; crash 1; start 1; read 2; claim 2; answer 2; read 3;"
        " lead 2; join 3 2; ack 3 2; take in 2 3; answer 2",
    ),
    "f": Rule(
        "the high watermark moves below the minimum", {"in_sync": (1,)}, "put 1 0"
    ),
    "f2": Rule(
        "the in-sync set shrinks below the minimum",
        {"shrinks": 2},
        "take out 1 3; answer 1; take out 1 2; answer 1",
    ),
    "g": Rule(
        "a member is not waited for before ZooKeeper has taken it out",
        {"shrinks": 1},
        "put 1 0; pull 3 1; take out 1 2",
    ),
    "h": Rule(
        "an older state of a directory is believed",
        {"crashes": 2, "rolls": 1},
        "crash 3; start 3; read 3; put 1 0; join 3 1; pull 3 1; crash 3;"
        " roll back 3 0; pull 2 1; start 3",
    ),
    "h2": Rule(
        "a replica is taken in though another directory is there now",
        {"in_sync": (1, 2), "crashes": 1, "wipes": 1, "expansions": 1},
        "read 3; join 3 1; ack 3 1; take in 1 3; crash 3; wipe 3; start 3; answer 1",
    ),
    "i": Rule(
        "a follower takes over the high watermark before it cuts",
        {"expiries": 1},
        "expire 1; read 2; claim 2; session 1; answer 2; answer 1; read 3; lead 2;"
        " put 2 0; join 3 2; put 1 0; read 1; pull 3 2; join 1 2",
    ),
    "j": Rule(
        "a step-down keeps what is in flight",
        {"expiries": 2},
        "put 1 0; expire 1; session 1; expire 1; read 2; claim 2; answer 2; read 3;"
        " lead 2; put 2 0; join 3 2; pull 3 2; session 1; join 1 2; pull 1 2",
    ),
    "k": Rule(
        "a replica that cut a tail is believed",
        {"crashes": 1, "tears": 1},
        "put 1 0; pull 2 1; pull 3 1; crash 2; tear 2 0; start 2",
    ),
    "l": Rule(
        "a log is deleted because the leader lacks it",
        {"logs": 2, "births": 1, "crashes": 1, "expiries": 1},
        "expire 2; make log 1; crash 1; start 1; session 2; claim 1; claim 2;"
        " answer 2; lead 2; answer 1; read 1; join 1 2",
    ),
    "m": Rule(
        "a follower acknowledges what is written and not synced",
        {},
        "put 1 0; pull 2 1; pull 3 1",
    ),
    "n": Rule(
        "epochs are not synced before the first byte of theirs",
        {"crashes": 4},
        "crash 2; put 1 0; pull 3 1; start 2; read 2; join 2 1; pull 2 1; crash 3;"
        " crash 2; crash 1; start 3; start 2; start 1; claim 2; answer 2; merge 2 3;"
        " lead 2; read 3; join 3 2",
    ),
    "o": Rule(
        "a put that is sent again is answered from the log alone",
        {"crashes": 1, "repeats": 1},
        "put 1 0; crash 1; start 1; claim 1; answer 1; merge 1 2; lead 1; repeat 1 1",
    ),
    "p": Rule(
        "a follower sees a byte that the leader has not written",
        {"refusals": 1},
        "put 1 0; pull 3 1; no room 1 0; put 1 0",
    ),
    "q": Rule(
        "a join keeps what a former life had",
        {"in_sync": (1, 2), "crashes": 1, "wipes": 1, "expansions": 1},
        "read 3; join 3 1; ack 3 1; crash 3; wipe 3; start 3; read 3; join 3 1;"
        " take in 1 3; answer 1",
    ),
    "q1": Rule(
        "a join counts the follower's end, not the divergence point",
        {"crashes": 1},
        "put 1 0; crash 1; start 1; read 3; claim 3; answer 3; lead 3; put 3 0;"
        " read 2; join 2 3; read 1; join 1 3; pull 2 3",
    ),
    "r": Rule(
        "an incomplete member claims",
        {"crashes": 2, "wipes": 1},
        "put 1 0; pull 2 1; pull 3 1; crash 1; session over 1; crash 2; wipe 2;"
        " start 2; claim 2; answer 2",
    ),
    "r2": Rule(
        "a crash forgets that a member is incomplete",
        {"crashes": 3, "wipes": 1},
        "put 1 0; pull 2 1; pull 3 1; crash 3; session over 3; crash 2; wipe 2;"
        " start 2; crash 2",
    ),
    "s": Rule(
        "claims do not say with which revision they began",
        {"crashes": 2, "restores": 1, "shrinks": 2, "give_ups": 1},
        "take out 1 3; answer 1; read 2; put 1 0; pull 2 1; ZooKeeper set back 1;"
        " crash 2; session 3; claim 3; answer 3; give up 3; answer 3; claim 3;"
        " answer 3; lead 3; start 2; read 2; join 2 3; put 3 0; pull 2 3;"
        " take out 3 1; answer 3; read 2; ack 2 3",
    ),
    "t": Rule(
        "a replica that cut a tail is its own witness where one is enough",
        {"crashes": 2, "tears": 1, "settings": 1},
        "set min 1; put 1 0; pull 3 1; crash 3; tear 3 0; pull 2 1; start 3; crash 1;"
        " read 3; start 1; read 3; claim 3; answer 3; lead 3",
    ),
    "u": Rule(
        "bytes below the leader's log start stay without being known equal",
        {"crashes": 1, "trims": 1},
        "put 1 0; crash 1; session over 1; read 2; claim 2; answer 2; lead 2; read 3;"
        " join 3 2; put 2 0; pull 3 2; trim 2 0; start 1; read 1; join 1 2; pull 1 2",
    ),
    "v": Rule(
        "a member that went is not waited for, before all others have saved that",
        {"restores": 1, "shrinks": 1},
        "take out 1 3; answer 1; put 1 0; pull 2 1; ZooKeeper set back 1; session 3;"
        " session 2; claim 3; answer 3; lead 3; read 2; join 2 3; put 3 0; pull 2 3",
    ),
    "w": Rule(
        "the high watermark does not wait for the leader's own sync",
        {"is_early": True, "crashes": 1},
        "put 1 0; pull 2 1; pull 3 1; crash 1",
    ),
    "sure": Rule(
        "a member that came from a backup claims alone",
        {"crashes": 3, "backups": 1},
        f"{OLD_COPY}; start 2; crash 1; session over 1; crash 3; session over 3;"
        " claim 2",
    ),
    "alone": Rule(
        "a claimer that came from a backup leads without an answer",
        {"crashes": 3, "backups": 1},
        f"{OLD_COPY}; start 2; crash 1; session over 1; claim 2; answer 2; crash 3;"
        " lead 2",
    ),
    "join": Rule(
        "a replica is sure of a backup before it has caught up with a leader",
        {"crashes": 2, "backups": 1},
        f"{OLD_COPY}; start 2; crash 1; session over 1; read 3; claim 3; answer 3;"
        " lead 3; read 2; join 2 3",
    ),
    "word": Rule(
        "a clean stop makes a good directory of a backup",
        {"crashes": 1, "backups": 1, "stops": 1},
        f"{OLD_COPY}; start 2; leave 2; close 2; start 2",
    ),
    "seal": Rule(
        "a backup of a replica that was about to stop is believed",
        {"backups": 1, "stops": 1},
        f"leave 3; back up 3; {ACKED}; close 3; put back 3; start 3",
    ),
    "void": Rule(
        "a start without ZooKeeper seals a backup of a replica that was about to stop",
        {"backups": 1, "stops": 2},
        f"leave 3; back up 3; {ACKED}; close 3; put back 3; start, close 3; start 3",
    ),
    "target": Rule(
        "a flag ends at the high watermark, before the epoch start",
        {"crashes": 2, "wipes": 1},
        "put 1 0; pull 2 1; pull 3 1; crash 1; session over 1; crash 3; wipe 3;"
        " start 3; read 2; claim 2; answer 2; lead 2; read 3; join 3 2; ack 3 2",
    ),
}


def config(name: str, *, switch: str) -> Config:
    bounds = {"puts": 3, "claims": 3, "is_led": True, **RULES[name].bounds}
    return Config(**bounds, switch=switch)


@pytest.mark.parametrize("name", RULES)
def test_a_broken_rule_is_found(name: str) -> None:
    """Without the rule these events contradict an invariant."""
    with pytest.raises(Violation) as found:
        replay(config(name, switch=name), RULES[name].history.split("; "))
    print(f"without rule {name}, {RULES[name].text}:\n{found.value}")


@pytest.mark.parametrize("name", RULES)
def test_the_rule_prevents_it(name: str) -> None:
    """The same events, as far as they can happen, contradict nothing with the rule."""
    follow(config(name, switch=""), RULES[name].history.split("; "))


@pytest.mark.slow
def test_a_leader_without_a_lease_breaks_nothing() -> None:
    """A leader goes on when its session is over: others may have claimed, or not.

    The model has no lease at all, so its sessions end under leaders that do not know.
    """
    bounds = Config(puts=2, claims=2, expiries=1, is_led=True)
    found = explore(bounds, depth_max=9)
    assert not found.violation, str(found)
