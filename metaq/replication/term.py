"""One term of a leader: its streams, and the checks that it makes while it leads.

Owned by the node, from when puts are accepted until it steps down.
"""

from typing import Final, Protocol

from metaq.errors import TooFewReplicasError
from metaq.replication.election import Presence
from metaq.replication.leading import LeadingStreams
from metaq.replication.progress import Leadership
from metaq.replication.replica import Replica, Transition, note_join, saved_by
from metaq.replication.store import ReplicaStore
from metaq.replication.upkeep import (
    WaitingPuts,
    can_others_lead,
    change_set,
    refuses_puts,
)

ALONE_S: Final = 10.0
"""Time without any follower after which a leader hands over, if others can lead."""


class TermNode(Protocol):
    """Interface of the node that `Term` needs."""

    @property
    def replica(self) -> Replica:
        """Return the state of the replica."""

    def set_replica(self, replica: Replica) -> None:
        """Replace the state by one that needs no action."""

    def wake(self) -> None:
        """Make the node check soon what is due."""

    def knows(self, replica: int, token: str) -> bool:
        """Return whether a token is that of `present/K`; if not, read the node soon."""


class Term:
    """The term of a leader. Used on the loop's thread."""

    def __init__(self, node: TermNode, store: ReplicaStore, *, lag_s: float) -> None:
        """Create a term; the logs follow until `begin`.

        Args:
            node: the node of the leader.
            store: its logs, in which the epoch has begun.
            lag_s: time that a follower may be late, in seconds.
        """
        self._node = node
        self._logs = store.logs
        self._waiting = WaitingPuts(lag_s)
        self._lost = set[int]()
        self._contact_s: float | None = None
        self.streams: Final = LeadingStreams(
            store.logs.logs(),
            store.tables,
            self,
            self.term,
            set_id=node.replica.file.set_id,
            lag_s=lag_s,
        )
        """Streams to the followers."""

    # -- what is due ------------------------------------------------------------------

    def tick(self, now_s: float) -> None:
        """Check idle followers and waiting puts; call several times a second."""
        self.streams.tick(now_s)
        self._waiting.check(self._logs.logs(), now_s)
        others = self.term.quorum.confirmed - {self._node.replica.id}
        if self._contact_s is None or not others or others - self.streams.stalled():
            self._contact_s = now_s

    def refusal(self, presences: tuple[Presence, ...]) -> TooFewReplicasError | None:
        """Return the reason why puts cannot be acknowledged; None if they may be."""
        own = self._node.replica
        if not refuses_puts(own, presences, self.streams.stalled()):
            return None
        return TooFewReplicasError(
            f"a put needs {own.record.min} replicas that sync it: in sync are"
            f" {sorted(own.record.in_sync)}, and not all of them follow"
        )

    def next_change(self, presences: tuple[Presence, ...]) -> Transition | None:
        """Return the next change of the in-sync set, or None."""
        own, streams = self._node.replica, self.streams
        return change_set(
            own,
            presences,
            stalled=streams.stalled(),
            lost=self._lost,
            caught_up=frozenset(filter(streams.has_caught_up, own.record.replicas)),
        )

    def is_alone(self, presences: tuple[Presence, ...], now_s: float) -> bool:
        """Return whether it reaches no follower although others can lead."""
        return (
            self._contact_s is not None
            and now_s - self._contact_s > ALONE_S
            and can_others_lead(self._node.replica, presences)
        )

    # -- of the streams (TermOwner) ---------------------------------------------------

    @property
    def term(self) -> Leadership:
        """Return the term of the core's state."""
        term = self._node.replica.term
        assert term is not None, f"replica {self._node.replica.id} does not lead"
        return term

    def on_join(self, replica: int, incarnation: int, revision: int) -> None:
        """Called when a follower has joined; its earlier process no longer counts."""
        self._lost.discard(replica)
        self._node.set_replica(note_join(self._node.replica, replica, incarnation))
        self.on_saved(replica, revision)

    def on_saved(self, replica: int, revision: int) -> None:
        """Called when a follower has saved this revision of the record."""
        self._node.set_replica(saved_by(self._node.replica, replica, revision))

    def on_caught_up(self, replica: int) -> None:
        """Called when a follower has caught up in all logs; `next_change` decides."""
        self._node.wake()

    def on_lost(self, replica: int) -> None:
        """Called when a member of the in-sync set lacks bytes that it promised."""
        self._lost.add(replica)
        self._node.wake()

    def knows(self, replica: int, token: str) -> bool:
        """Return whether a token is that of `present/K`."""
        return self._node.knows(replica, token)
