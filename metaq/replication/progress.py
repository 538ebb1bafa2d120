"""Progress of a set, at its leader: matches of the followers and the commit bound.

A follower asks for bytes, syncs them and reports its synced end in each log: its
*match*. The high watermark of a log waits for each replica that may be in ZooKeeper's
in-sync set, in a set that is confirmed, proposed or of unknown outcome; and for a
joining replica in each log in which it has caught up (together, the *maximal* in-sync
set):

    state       in the confirmed set   in a proposed set   the high watermark waits
    out         no                     no                  no
    joining     no                     perhaps             in logs where it caught up
    in sync     yes                    in all              yes
    leaving     yes                    not in one          yes, until that is confirmed,
                                                           and the others have saved it

A replica joins log by log, because under steady load thousands of logs are never all
caught up at the same moment. Acknowledgements to an earlier process of a follower do
not count: each join sets its match to what both copies are known to share.

Invariants:

* the high watermark is an append's end or the epoch start, and never goes down: the log
  itself moves it (`PartitionLog`), within the bound returned by this module;
* its first move is to the epoch start, in one step: bytes of earlier epochs are
  committed by the first committed byte of this one, or by the start of the epoch
  itself;
* it moves only while the confirmed in-sync set has `min` members;
* acknowledged means: the end of the put is at or below it.
"""

from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from typing import Self

from metaq.model import MAX_OFFSET, Offset
from metaq.replication.epochs import CopyFacts, Epoch, divergence_point

NOTHING = Offset(0)
"""Match of a follower that has not joined the log."""


@dataclass(frozen=True, slots=True)
class Quorum:
    """The in-sync sets that ZooKeeper may hold, as known to the leader."""

    leader: int
    confirmed: frozenset[int]
    """In-sync set of the record that was read or confirmed last."""
    min: int
    open: tuple[frozenset[int], ...] = ()
    """In-sync sets of proposed changes with unknown outcome."""
    former: frozenset[int] = frozenset()
    """Members that left, until all others have saved the record without them."""

    @property
    def waited(self) -> frozenset[int]:
        """Replicas that every high watermark waits for, including the leader."""
        return self.confirmed.union(self.former, *self.open)

    @property
    def others(self) -> frozenset[int]:
        """Followers that every high watermark waits for."""
        return self.waited - {self.leader}

    def propose(self, in_sync: frozenset[int]) -> "Quorum":
        """Return the quorum while a change may take effect at any moment."""
        return replace(self, open=(*self.open, in_sync))

    def settle(self, in_sync: frozenset[int], *, min_in_sync: int) -> "Quorum":
        """Return the quorum once the record is known and no change is proposed.

        It still waits for members that left: if ZooKeeper were set back now and this
        leader were away, one of them could claim, and no copy would contradict it.
        """
        former = (self.former | self.confirmed) - in_sync
        return replace(self, confirmed=in_sync, min=min_in_sync, open=(), former=former)


@dataclass(frozen=True, slots=True)
class LogProgress:
    """One log at its leader. Its owner replaces it at each event."""

    number: int
    epoch_start: Offset
    """End of the log when this replica began to lead."""
    hw: Offset
    match: tuple[tuple[int, Offset], ...] = ()
    """Replica → synced end, for those that joined in this epoch."""
    joined: frozenset[int] = frozenset()
    """Replicas that have caught up since they joined."""

    def match_of(self, replica: int) -> Offset:
        """Return the end to which a follower's copy is known to be equal and synced."""
        return dict(self.match).get(replica, NOTHING)

    def join(self, replica: int, point: Offset) -> Self:
        """Return the progress after a follower joined, equal up to a point."""
        match = {**dict(self.match), replica: point}
        return replace(
            self, match=tuple(sorted(match.items())), joined=self.joined - {replica}
        )

    def leave(self, replica: int) -> Self:
        """Return the progress after a follower left the set; it may catch up again."""
        return replace(self, joined=self.joined - {replica})

    def acknowledge(self, replica: int, end: Offset) -> Self:
        """Return the progress after a follower's sync.

        Args:
            replica: a follower that joined in this epoch, with this incarnation
                (`Leadership.takes`).
            end: its synced end; acknowledgements of a stream never decrease.
        """
        match = {**dict(self.match), replica: max(self.match_of(replica), end)}
        has_caught_up = end >= max(self.hw, self.epoch_start)
        return replace(
            self,
            match=tuple(sorted(match.items())),
            joined=self.joined | {replica} if has_caught_up else self.joined,
        )

    def bound(self, quorum: Quorum) -> Offset | None:
        """Return the high watermark that the other copies allow; None: it stays.

        An append that ends at or below it is committed once it is synced here.
        """
        if len(quorum.confirmed) < quorum.min:
            return None
        match = dict(self.match)
        others = (quorum.waited | self.joined) - {quorum.leader}
        limit = min((match.get(each, NOTHING) for each in others), default=MAX_OFFSET)
        return limit if limit >= self.epoch_start else None


def begin_progress(copy: CopyFacts) -> LogProgress:
    """Return the progress of a log at the start of an epoch, without followers."""
    return LogProgress(copy.number, copy.end, copy.hw)


@dataclass(frozen=True, slots=True)
class Leadership:
    """The term of a leader: its quorum, and the incarnations of its followers."""

    epoch: Epoch
    quorum: Quorum
    incarnations: tuple[tuple[int, int], ...] = ()
    """Replica → its incarnation, the holdings version with which it joined last."""
    saved: tuple[tuple[int, int], ...] = ()
    """Replica → revision of the record in its `set` file."""

    def join(self, replica: int, incarnation: int) -> "Leadership":
        """Return the term after a follower joined; its earlier process is void."""
        incarnations = {**dict(self.incarnations), replica: incarnation}
        return replace(self, incarnations=tuple(sorted(incarnations.items())))

    def save(self, replica: int, revision: int, *, current: int) -> "Leadership":
        """Return the term after a follower has reported the record that it has saved.

        Args:
            replica: the follower.
            revision: revision of its copy.
            current: revision of the confirmed record.
        """
        saved = {**dict(self.saved), replica: revision}
        others = self.quorum.confirmed - {self.quorum.leader}
        quorum = self.quorum
        if all(saved.get(each, 0) >= current for each in others):
            quorum = replace(quorum, former=frozenset())
        return replace(self, quorum=quorum, saved=tuple(sorted(saved.items())))

    def takes(self, replica: int, incarnation: int, epoch: Epoch) -> bool:
        """Return whether a follower's message is of its last join and this epoch."""
        return epoch == self.epoch and (replica, incarnation) in self.incarnations


@dataclass(frozen=True, slots=True)
class JoinAnswer:
    """The leader's reply to a join, for one log."""

    copy: CopyFacts
    """The leader's copy."""
    point: Offset
    """Offset up to which the follower's copy is equal; it is truncated only here."""
    target: Offset
    """End at which the follower has all bytes that it may have promised."""


def answer_join(
    log: LogProgress, copy: CopyFacts, follower: CopyFacts | None
) -> JoinAnswer:
    """Return the reply about one log, for a follower that has not pulled yet.

    Args:
        log: the log at the leader.
        copy: the leader's copy.
        follower: the follower's copy; None if it has none that counts. A log with
            another number is another log, even under the same name.
    """
    is_same = follower is not None and follower.number == copy.number
    point = divergence_point(copy, follower) if follower and is_same else copy.start
    return JoinAnswer(copy, point, max(log.hw, log.epoch_start))


def has_lost(log: LogProgress, quorum: Quorum, replica: int, point: Offset) -> bool:
    """Return whether a joining member of the in-sync set lacks bytes that it promised.

    Must be called before the join sets its match.

    Args:
        log: the log at the leader.
        quorum: quorum of the leader.
        replica: the follower.
        point: divergence point in the reply to its join.
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
    """Return whether a put may be appended, because it can be acknowledged for now.

    Args:
        quorum: quorum of the leader.
        stalled: followers that are silent, or late by the lag time.
        flagged: replicas that are incomplete.
        present: replicas with a node in ZooKeeper.
    """
    return (
        len(quorum.confirmed) >= quorum.min
        and not quorum.others & (stalled | flagged)
        and quorum.others <= present
    )
