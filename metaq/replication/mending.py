"""Repair of this replica's damaged ranges from the copies of the other replicas.

    damage found    by the scrub, at the start, by a get, by `check`, or by a replica
                    that compares
    ask             each other replica, until one has the range: it first compares both
                    copies' epochs, and its own bytes with its span index
    write           in place, synced, and checked against the own index
                    (`storage/mend.py`)
    go on           a stopped log is opened again

No leader is needed. If the range is damaged on all replicas, a majority may still agree
in each bit, and the own index shows whether the result is right. If not, the range is
lost: from then on, gets report the damage. If some replicas are absent, the range is
asked for again. Damage without an end is not a range: such a log lacks bytes, and so
does its replica (`missing`).
"""

import asyncio
import logging
from collections.abc import Iterable, Sequence
from contextlib import AsyncExitStack
from typing import Final, Protocol

from metaq.clock import Clock
from metaq.errors import MetaqError, StorageError
from metaq.model import BrokerAddress, Offset, parse_broker_address
from metaq.peer.connection import BrokerConnection
from metaq.replication.comparing import Comparison
from metaq.replication.election import Flag, unflagged
from metaq.replication.follow_task import connected
from metaq.replication.following import ask
from metaq.replication.messages import TAIL, TailRequest
from metaq.replication.replica import (
    Replica,
    ReplicaRole,
    Transition,
    declare_incomplete,
)
from metaq.replication.serving import CHUNK_BYTES_MAX, facts_of, read_unchecked
from metaq.replication.set_nodes import SetView
from metaq.replication.store import ReplicaStore
from metaq.storage.log_state import LogState
from metaq.storage.mend import damage_left, finish, piece_at, write_piece
from metaq.storage.partition_log import PartitionLog
from metaq.storage.segment import Damage

_log = logging.getLogger(__name__)

CHECK_S: Final = 0.5
"""Interval of checks of all logs while one is or may be damaged, in seconds."""
VOTES: Final = 3
"""Number of copies that are compared if none is good."""
COMPARE_S: Final = 10.0
"""Interval in seconds at which one sealed segment is compared, a tebibyte in three
hours, and at which all logs are checked for damage."""
AGAIN_S: Final = 5.0
"""Pause before a range that no replica could give is asked for again, in seconds."""
ANSWER_S: Final = 5.0
"""Longest wait for a piece of a copy, in seconds."""


MENDS: Final = frozenset(
    {ReplicaRole.IDLE, ReplicaRole.FOLLOWING, ReplicaRole.LEADING, ReplicaRole.DRAINING}
)
"""Roles in which damage is repaired; in others, ends must not change, for a claim."""


class MendNode(Protocol):
    """Interface of the node that `Mender` needs."""

    @property
    def replica(self) -> Replica:
        """Return the state of the replica."""

    seen: SetView | None
    """The set, as last read."""

    @property
    def lock(self) -> asyncio.Lock:
        """Return the lock under which the role does not change."""

    def on_reopened(self, log: PartitionLog) -> None:
        """Lead or join with a log that follows again; called under `lock`."""


class Mender:
    """Repairs damage of one replica. Owned by the node; used on the loop's thread."""

    def __init__(self, node: MendNode, store: ReplicaStore, *, clock: Clock) -> None:
        """Create a mender that is not running.

        Args:
            node: the node of the replica.
            store: its logs.
            clock: for deadlines.
        """
        self._node = node
        self._store = store
        self._clock = clock
        self._not_before_s: dict[Damage, float] = {}
        self._written: set[Damage] = set()
        """Repaired ranges of stopped logs, until the log is opened again."""
        self.comparison: Final = Comparison(clock=clock)
        """Comparison of the own copies with those of others."""
        self._turn = 0
        self._due = asyncio.Event()
        self._checked_s = clock.monotonic_s()
        self.damaged_count = 0
        """Number of damaged ranges at the last check."""
        self.missing = ""
        """Reason why bytes outside of damaged ranges are missing; "" if none are."""
        self.mended_count = 0
        """Number of ranges repaired since the start."""
        self.mended_bytes = 0

    async def run(self) -> None:
        """Repair damage until cancelled."""
        compared_s = self._clock.monotonic_s()
        while True:
            await self._due.wait()
            for each in self._store.logs.directories():
                each.is_damage_new = False
            if self._clock.monotonic_s() - compared_s >= COMPARE_S and self._may_mend:
                await self._compare()
                compared_s = self._clock.monotonic_s()
            damaged = [log for log in self._store.logs.logs().values() if log.damage]
            self.damaged_count = sum(len(log.damage) for log in damaged)
            self.missing = next(filter(None, map(_missing_of, damaged)), "")
            for log in damaged:
                if self._may_mend:
                    await self._mend_log(log)
            if not damaged:
                self._not_before_s.clear()
                self._written.clear()
            self._checked_s = self._clock.monotonic_s()
            self._due.clear()

    def check(self) -> None:
        """Start a check of all logs if one may be damaged; called by the node.

        Otherwise the check waits for the next comparison, because there may be
        thousands of logs and most are never damaged.
        """
        directories = self._store.logs.directories()
        is_new = any(each.is_damage_new for each in directories)
        pause_s = CHECK_S if is_new or self.damaged_count else COMPARE_S
        if self._clock.monotonic_s() - self._checked_s >= pause_s:
            self._due.set()

    async def _compare(self) -> None:
        """Compare one sealed segment with another replica that is present."""
        sources = self._sources()
        there = [(replica, each) for replica, each in sources.items() if each]
        found = self.comparison.next_segment(self._store.logs.logs(), sources)
        if there and found is not None:
            log, segment = found
            set_id, copy = (
                self._node.replica.file.set_id,
                facts_of(log, self._store.tables),
            )
            self._turn += 1
            other = there[self._turn % len(there)]
            await self.comparison.compare(log, segment, other, set_id, copy)

    def note_missing(self) -> Transition | None:
        """Return the step to join again with nothing if this replica lacks bytes.

        That is, bytes that are not in a damaged range; a leader gives up first.
        """
        own = self._node.replica
        joins = own.role in {ReplicaRole.IDLE, ReplicaRole.FOLLOWING}
        if not self.missing or not joins or own.file.flag is Flag.INCOMPLETE:
            return None
        _log.error("replica %d lacks bytes: %s", own.id, self.missing)
        return declare_incomplete(own)

    @property
    def _may_mend(self) -> bool:
        """Whether the logs are those of the set, and no claim is open."""
        return self._node.replica.role in MENDS

    def _sources(self) -> dict[int, BrokerAddress | None]:
        """Return the other replicas; None for one without a proven copy now."""
        own, seen = self._node.replica, self._node.seen
        shown = {} if seen is None else seen.shown
        ready = unflagged(each.presence for each in shown.values())
        return {
            each: parse_broker_address(shown[each].address) if each in ready else None
            for each in sorted(own.record.replicas - {own.id})
        }

    async def _mend_log(self, log: PartitionLog) -> None:
        try:
            for damage in log.damage:
                await self._mend(log, damage)
            written = self._written & set(log.damage)
            is_stopped = log.state is LogState.STOPPED
            if not written or (is_stopped and written < _ranges(log.damage)):
                return
            async with self._node.lock:
                if not self._may_mend:
                    return
                if await finish(self._store.logs, log, written):
                    self._node.on_reopened(log)
            self._written -= written
            self.mended_count += len(written)
            for each in written:
                _log.warning("damage mended: partition=%s %s", log.log_id, each)
        except MetaqError as error:
            _log.warning("damage not mended: partition=%s error=%s", log.log_id, error)

    async def _mend(self, log: PartitionLog, damage: Damage) -> None:
        """Repair one range, if it is due and another replica has it."""
        end, now_s = damage.next_good_offset, self._clock.monotonic_s()
        is_due = now_s >= self._not_before_s.get(damage, now_s)
        is_known = end is not None and end <= log.high_watermark
        if not is_due or not is_known or damage.is_empty or damage in self._written:
            return
        self._not_before_s[damage] = now_s + AGAIN_S
        sources, flawed = self._sources(), set[int]()
        for replica, address in sources.items():
            if address is None:
                continue
            try:
                flaw = await self._copy([address], log, damage)
            except MetaqError as error:
                _not_mended(replica, log, damage, str(error))
                continue
            if not flaw:
                self._written.add(damage)
                return
            _not_mended(replica, log, damage, flaw)
            flawed.add(replica)
        if flawed == set(sources):
            await self._vote(list(filter(None, sources.values())), log, damage)

    async def _vote(
        self, addresses: Sequence[BrokerAddress], log: PartitionLog, damage: Damage
    ) -> None:
        """Repair a range that is damaged on all replicas by a majority of each bit.

        A bit in the header of a record damages its whole span, so three bits at three
        positions may damage the same range on three replicas.
        """
        try:
            flaw = f"expected {VOTES} copies to compare, got {len(addresses) + 1}"
            if len(addresses) + 1 >= VOTES:
                flaw = await self._copy(addresses[: VOTES - 1], log, damage)
        except MetaqError as error:
            _log.warning("no vote: partition=%s error=%s", log.log_id, error)
            return
        if flaw:
            _log.error("no good copy: partition=%s %s (%s)", log.log_id, damage, flaw)
            log.on_lost(damage)
        else:
            self._written.add(damage)

    async def _copy(
        self, addresses: Sequence[BrokerAddress], log: PartitionLog, damage: Damage
    ) -> str:
        """Write a range from one replica, or from a majority of copies, and check it.

        Returns the reason why these copies are not good; "" when the range is written.

        Raises:
            MetaqError: that is unknown; the range may be partly written.
        """
        offset = damage.offset
        async with AsyncExitStack() as stack:
            connections = [
                await stack.enter_async_context(connected(address, self._clock))
                for address in addresses
            ]
            while (piece := piece_at(log, damage, offset)) is not None:
                start = offset
                while offset < piece.end:
                    size = min(CHUNK_BYTES_MAX, piece.end - offset)
                    data = await self._read(connections, log, offset, size)
                    if data is None:
                        return "it is damaged there, too"
                    await write_piece(
                        self._store.logs, log, piece.segment, offset, data
                    )
                    offset = Offset(offset + len(data))
                    self.mended_bytes += len(data)
                fs = self._store.fs
                left = await damage_left(fs, log, piece.segment, start, offset)
                if left:
                    return f"others have other bytes: {left[0]}"
        if offset != damage.next_good_offset:
            raise StorageError(f"no file has offset {offset}")
        return ""

    async def _read(
        self,
        connections: Sequence[BrokerConnection],
        log: PartitionLog,
        offset: Offset,
        size: int,
    ) -> bytes | None:
        """Return the good bytes of one copy, or the majority of three copies."""
        if len(connections) == 1:
            return await self._ask(connections[0], log, offset, size)
        copies = [await read_unchecked(log, offset, size)]
        for each in connections:
            found = await self._ask(each, log, offset, size, is_unchecked=True)
            copies.append(found or b"")
        one, two, three = (int.from_bytes(each, "big") for each in copies)
        if {len(each) for each in copies} != {size}:
            raise StorageError(f"a copy has not all bytes at {offset}")
        return (one & two | two & three | one & three).to_bytes(size, "big")

    async def _ask(
        self,
        connection: BrokerConnection,
        log: PartitionLog,
        offset: Offset,
        size: int,
        *,
        is_unchecked: bool = False,
    ) -> bytes | None:
        """Request bytes from one replica; None: they are damaged there.

        Raises:
            MetaqError: it does not have them, or does not reply.
        """
        replica = self._node.replica
        assert log.number is not None
        request = TailRequest(
            replica.file.set_id,
            replica.record.epoch,
            log.number,
            offset,
            size,
            is_unchecked,
            facts_of(log, self._store.tables),
        )
        reply = await ask(
            connection, TAIL, request, clock=self._clock, timeout_s=ANSWER_S
        )
        chunk = reply.chunk
        if reply.is_damaged:
            return None
        if chunk is None or (chunk.number, chunk.offset) != (log.number, offset):
            raise StorageError(f"{connection.address} has no bytes at {offset}")
        return b"".join(chunk.body)[:size]


def _not_mended(replica: int, log: PartitionLog, damage: Damage, why: str) -> None:
    _log.warning(
        "not mended by replica %d: partition=%s offset=%d cause=%s",
        replica,
        log.log_id,
        damage.offset,
        why,
    )


def _ranges(damage: Iterable[Damage]) -> set[Damage]:
    """Return the damage to repair before a log is opened again."""
    return {each for each in damage if not each.is_empty}


def _missing_of(log: PartitionLog) -> str:
    """Return the reason why a log lacks bytes without an end; "" for a range."""
    end = log.damage[-1].next_good_offset
    is_open = log.state is LogState.STOPPED and (end is None or end > log.synced_end)
    return f"partition {log.log_id} is stopped: {log.damage[-1]}" if is_open else ""
