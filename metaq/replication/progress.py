"""The leader's side of a set: who has what, and up to where everything is committed.

A follower asks for bytes, syncs them and says how far each log is: its *match*. The
high watermark of a log waits for each replica that ZooKeeper may hold for in-sync,
whether a change is confirmed, proposed or of unknown outcome, and for a joining one in
each log in which it has caught up (the *maximal* in-sync set):

    state       in the confirmed set   in a proposed set   the high watermark waits
    out         no                     no                  no
    joining     no                     perhaps             in logs where it caught up
    in sync     yes                    in all              yes
    leaving     yes                    not in one          yes, until that is confirmed,
                                                           and the others have saved it

Logs join one by one: under steady load there is no moment at which thousands of logs
are all caught up. What a follower had in a former life counts no more: each join sets
its match to what both copies are known to share.

Invariants:

* the high watermark is an append's end or the epoch start, and never goes down: the log
  itself moves it (`PartitionLog`), within the bound that this module gives it;
* it first moves to the epoch start, in one step: bytes of former epochs are committed
  by the first byte of this one that is, or by the epoch's beginning itself;
* it moves only while the confirmed in-sync set has `min` members;
* acknowledged means: the end of the put is at or below it.
"""

from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from typing import Self

from metaq.model import MAX_OFFSET, Offset
from metaq.replication.epochs import CopyFacts, Epoch, parting_point

NOTHING = Offset(0)
"""Match of a follower that has not joined a log."""


@dataclass(frozen=True, slots=True)
class Quorum:
    """The in-sync sets that ZooKeeper may hold, as the leader knows it."""

    leader: int
    confirmed: frozenset[int]
    """Of the record that was read or confirmed last."""
    min: int
    open: tuple[frozenset[int], ...] = ()
    """Of changes that were proposed, until it is known whether they landed."""
    former: frozenset[int] = frozenset()
    """Members that went, until all others have saved the record that says so."""

    @property
    def waited(self) -> frozenset[int]:
        """Replicas that every high watermark waits for; the leader among them."""
        return self.confirmed.union(self.former, *self.open)

    @property
    def others(self) -> frozenset[int]:
        """Followers that every high watermark waits for."""
        return self.waited - {self.leader}

    def propose(self, in_sync: frozenset[int]) -> "Quorum":
        """Return the quorum while a change may land at any moment."""
        return replace(self, open=(*self.open, in_sync))

    def settle(self, in_sync: frozenset[int], *, min_in_sync: int) -> "Quorum":
        """Return the quorum when the record is known and no change is on its way.

        Members that went are waited for yet: were ZooKeeper set back now, and this
        leader away, one of them could claim, and no copy would contradict it.
        """
        former = (self.former | self.confirmed) - in_sync
        return replace(self, confirmed=in_sync, min=min_in_sync, open=(), former=former)


@dataclass(frozen=True, slots=True)
class LogProgress:
    """One log at its leader. The owner of the log replaces it at each event."""

    number: int
    epoch_start: Offset
    """Its end when this replica began to lead."""
    hw: Offset
    match: tuple[tuple[int, Offset], ...] = ()
    """Replica → synced end, of those that joined in this epoch."""
    joined: frozenset[int] = frozenset()
    """Replicas that have caught up once since they joined."""

    def match_of(self, replica: int) -> Offset:
        """Return how far a follower's copy is known to be equal and synced."""
        return dict(self.match).get(replica, NOTHING)

    def join(self, replica: int, point: Offset) -> Self:
        """Return the progress after a follower joined, equal up to a point."""
        match = {**dict(self.match), replica: point}
        return replace(
            self, match=tuple(sorted(match.items())), joined=self.joined - {replica}
        )

    def leave(self, replica: int) -> Self:
        """Return the progress when a follower is out: it may catch up again."""
        return replace(self, joined=self.joined - {replica})

    def acknowledge(self, replica: int, end: Offset) -> Self:
        """Return the progress after a follower's sync.

        Args:
            replica: a follower of this epoch, in the life in which it joined
                (`Leadership.takes`).
            end: its synced end; acknowledgements of a stream never go back.
        """
        match = {**dict(self.match), replica: max(self.match_of(replica), end)}
        has_caught_up = end >= max(self.hw, self.epoch_start)
        return replace(
            self,
            match=tuple(sorted(match.items())),
            joined=self.joined | {replica} if has_caught_up else self.joined,
        )

    def bound(self, quorum: Quorum) -> Offset | None:
        """Return how far the other copies allow the high watermark; None: it stays.

        An append that ends there or before is committed once it is synced here.
        """
        if len(quorum.confirmed) < quorum.min:
            return None
        match = dict(self.match)
        others = (quorum.waited | self.joined) - {quorum.leader}
        limit = min((match.get(each, NOTHING) for each in others), default=MAX_OFFSET)
        return limit if limit >= self.epoch_start else None


def begin_progress(copy: CopyFacts) -> LogProgress:
    """Return the progress of a log at the begin of an epoch: all followers reset."""
    return LogProgress(copy.number, copy.end, copy.hw)


@dataclass(frozen=True, slots=True)
class Leadership:
    """The term of a leader: its quorum, and the lives of its followers."""

    epoch: Epoch
    quorum: Quorum
    lives: tuple[tuple[int, int], ...] = ()
    """Replica → holdings version with which it joined last."""
    saved: tuple[tuple[int, int], ...] = ()
    """Replica → revision of the record that it has in its `set` file."""

    def join(self, replica: int, incarnation: int) -> "Leadership":
        """Return the term after a follower joined: its former life counts no more."""
        lives = {**dict(self.lives), replica: incarnation}
        return replace(self, lives=tuple(sorted(lives.items())))

    def save(self, replica: int, revision: int, *, current: int) -> "Leadership":
        """Return the term after a follower has said what record it has saved.

        Args:
            replica: the follower.
            revision: of its copy.
            current: of the confirmed record.
        """
        saved = {**dict(self.saved), replica: revision}
        others = self.quorum.confirmed - {self.quorum.leader}
        quorum = self.quorum
        if all(saved.get(each, 0) >= current for each in others):
            quorum = replace(quorum, former=frozenset())
        return replace(self, quorum=quorum, saved=tuple(sorted(saved.items())))

    def takes(self, replica: int, incarnation: int, epoch: Epoch) -> bool:
        """Return whether a message of a follower counts: its life and this epoch."""
        return epoch == self.epoch and (replica, incarnation) in self.lives


@dataclass(frozen=True, slots=True)
class JoinAnswer:
    """The leader's answer to a join, of one log."""

    copy: CopyFacts
    """The leader's copy."""
    point: Offset
    """The follower's copy is equal up to here: it cuts here, and nowhere else."""
    target: Offset
    """From here on the follower has everything that it may have promised."""


def answer_join(
    log: LogProgress, copy: CopyFacts, follower: CopyFacts | None
) -> JoinAnswer:
    """Return what a follower is to do with one log before it pulls.

    Args:
        log: the log at the leader.
        copy: the leader's copy.
        follower: the follower's; None where it has none that counts. A log of another
            number is another log, also under the same name.
    """
    is_same = follower is not None and follower.number == copy.number
    point = parting_point(copy, follower) if follower and is_same else copy.start
    return JoinAnswer(copy, point, max(log.hw, log.epoch_start))


def has_lost(log: LogProgress, quorum: Quorum, replica: int, point: Offset) -> bool:
    """Return whether a joining member of the in-sync set lacks bytes that it promised.

    Asked before the join sets its match.

    Args:
        log: the log at the leader.
        quorum: of the leader.
        replica: the follower.
        point: of the answer to its join.
    """
    is_member = replica in quorum.confirmed
    return is_member and point < max(log.match_of(replica), log.hw)


def may_put(
    quorum: Quorum,
    *,
    stalled: AbstractSet[int],
    flagged: AbstractSet[int],
    present: AbstractSet[int],
) -> bool:
    """Return whether a put may be appended: it will be acknowledged, as far as is seen.

    Args:
        quorum: of the leader.
        stalled: followers that are silent, or late by the lag time.
        flagged: replicas that are incomplete.
        present: replicas with a node in ZooKeeper.
    """
    return (
        len(quorum.confirmed) >= quorum.min
        and not quorum.others & (stalled | flagged)
        and quorum.others <= present
    )
