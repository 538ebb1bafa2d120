"""A set of replicas whose disks, wires and ZooKeeper are values; the core decides.

A `World` is one moment. `moves` names what may happen next, and makes the world after
it when asked: explorers try all of them, walks choose. Everything that decides is a
function of `metaq.replication`; this room carries out what they return, as a broker
does, and loses, delays and breaks things.

A log holds bytes, each with the number of its put, so two copies can be compared. A put
is acknowledged when its ticket is answered. Budgets bound how often each kind of event
may happen, so that a space of worlds can be finite.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, TypeAlias

from metaq.replication.election import Flag, Presence
from metaq.replication.epochs import CopyFacts, Epoch, EpochTable, begin_epoch
from metaq.replication.record import Change, SetRecord, make_record
from metaq.replication.replica import (
    BeginEpoch,
    LeaderSeen,
    Replica,
    ReplicaRole,
    SaveHoldings,
    SaveSet,
    SetFile,
    SimpleAction,
    Transition,
    View,
)
from tests.replication.model_log import ModelLog, begin_model_log

R = ReplicaRole
SET = "set"
NO_LOG = 0
"""Number in the place of a log that is not there."""


class Violation(AssertionError):
    """An invariant of the set does not hold."""


@dataclass(frozen=True)
class Config:
    """Bounds of what may happen; by default nothing goes wrong."""

    puts: int = 2
    logs: int = 1
    min: int = 2
    in_sync: tuple[int, ...] = (1, 2, 3)
    is_empty: bool = False
    """Whether replicas that are not in sync have empty directories."""
    claims: int = 2
    crashes: int = 0
    expiries: int = 0
    shrinks: int = 0
    expansions: int = 0
    late: int = 0
    """Acknowledgements that are delayed."""
    unknown: int = 0
    """Changes whose answer gets lost."""
    wipes: int = 0
    rolls: int = 0
    tears: int = 0
    handovers: int = 0
    give_ups: int = 0
    repeats: int = 0
    """Puts that a client sends again after they were in doubt."""
    refusals: int = 0
    """Appends that find no room."""
    forces: int = 0
    restores: int = 0
    """Times that ZooKeeper is set back to an older state."""
    settings: int = 0
    """Changes of the minimum."""
    trims: int = 0
    births: int = 0
    """Logs that are made while the set runs."""
    stale: int = 0
    """Reads of a server that lags."""
    stops: int = 0
    """Stops in good order."""
    backups: int = 0
    """Copies of a directory, each of which may come back once."""
    is_led: bool = False
    """Whether replica 1 leads at first, and the others have joined."""
    is_early: bool = False
    """Whether followers get what a leader has written before it is synced there."""
    is_wide: bool = False
    """Whether a put may have two bytes."""
    switch: str = ""
    """Names of broken rules."""

    def breaks(self, rule: str) -> bool:
        return rule in self.switch.split()


BUDGETED = [
    *("claims", "crashes", "expiries", "shrinks", "expansions", "late", "unknown"),
    *("wipes", "rolls", "tears", "handovers", "give_ups", "repeats", "refusals"),
    *("forces", "restores", "settings", "trims", "births", "stale"),
    *("stops", "backups"),
]


class Copy(NamedTuple):
    """One replica's copy of a log on its disk."""

    number: int
    data: tuple[int, ...] = ()
    """From its start to its end."""
    start: int = 0
    table: EpochTable = ()
    hw: int = 0
    """As it is in `watermarks`."""
    unsynced: int = 0
    """Bytes at the end that a crash loses."""
    old_table: EpochTable | None = None
    """Table before what was written last: where it is not synced, a crash leaves it."""

    @property
    def end(self) -> int:
        return self.start + len(self.data)

    def facts(self, hw: int) -> CopyFacts:
        return CopyFacts(self.number, self.start, self.end, hw, self.table)  # type: ignore[arg-type]

    def cut(self, end: int) -> "Copy":
        data = self.data[: max(0, end - self.start)]
        return self._replace(data=data, hw=min(self.hw, end))

    def at(self, begin: int, end: int) -> tuple[int, ...]:
        return self.data[begin - self.start : end - self.start]


class Disk(NamedTuple):
    file: SetFile | None
    holdings: int
    logs: tuple[Copy, ...]
    is_torn: bool = False
    """Whether recovery will find a torn tail."""
    is_suspect: bool = False
    """Whether it was damaged since the replica ran."""
    is_sealed: bool = False
    """Whether the last life has closed it."""
    is_old: bool = False
    """Whether it came back from a backup, and the replica is not sure of it."""


class Ticket(NamedTuple):
    """A put in flight."""

    put: int
    log: int
    end: int


class Proc(NamedTuple):
    """A replica that runs."""

    replica: Replica
    hws: tuple[int, ...]
    logs: tuple[ModelLog, ...] = ()
    targets: tuple[int, ...] = ()
    tickets: frozenset[Ticket] = frozenset()
    is_flying: bool = False
    """Whether its change is on its way to ZooKeeper."""


class Zk(NamedTuple):
    record: SetRecord
    version: int
    leader: tuple[int, Epoch] | None
    members: tuple[int, ...]
    present: tuple[Presence | None, ...]


class Ack(NamedTuple):
    leader: int
    follower: int
    incarnation: int
    epoch: Epoch
    ends: tuple[int, ...]
    revision: int


class World(NamedTuple):
    zk: Zk
    disks: tuple[Disk, ...]
    procs: tuple[Proc | None, ...]
    net: frozenset[Ack]
    committed: tuple[tuple[int, ...], ...]
    """Of each log the bytes below the true high watermark, from offset 0."""
    acked: frozenset[Ticket]
    lost: frozenset[Ticket]
    """Puts that were answered as in doubt."""
    puts: int
    forced: int
    """The last forced epoch; only replicas that have gone past it are compared."""
    left: tuple[int, ...]
    """Budgets."""
    old: tuple[Zk, ...]
    """Earlier states of ZooKeeper, where they may come back."""
    is_back: bool
    """Whether ZooKeeper was set back, and no operator has restored the record."""
    leaving: frozenset[int] = frozenset()
    """Replicas that are about to close their directories."""
    backups: tuple[Disk | None, ...] = (None, None, None)


Move: TypeAlias = tuple[str, Callable[[], World]]


def at(items: tuple[Any, ...], index: int, value: Any) -> tuple[Any, ...]:
    return (*items[:index], value, *items[index + 1 :])


@dataclass(frozen=True)
class SetModel:
    """The rules by which one world follows another."""

    config: Config = field(default_factory=Config)

    # -- the first world ------------------------------------------------------------

    def first(self) -> World:
        """Return the set while all are idle and have one byte in each log."""
        c = self.config
        record = make_record(
            SET, 1, frozenset({1, 2, 3}), min_in_sync=c.min, nonce="init"
        )
        record = replace(record, in_sync=frozenset(c.in_sync))
        epoch = record.epoch
        copies = tuple(Copy(i + 1) for i in range(c.logs))
        if c.births:
            copies = (*copies[:-1], Copy(NO_LOG))
        disks, procs = [], []
        for k in (1, 2, 3):
            flag = Flag.INCOMPLETE if c.is_empty and k not in c.in_sync else Flag.NONE
            file = SetFile(SET, k, record, epoch.number, 0, flag)
            replica = Replica(R.IDLE, file, 0, incarnation=1, is_sure=not flag)
            disks.append(Disk(file, 1, copies))
            procs.append(Proc(replica, (0,) * c.logs))
        present = tuple(proc.replica.presence() for proc in procs)
        zk = Zk(record, 0, None, (1, 1, 1), present)
        left = tuple(getattr(c, name) for name in BUDGETED)
        return World(
            zk,
            tuple(disks),
            tuple(procs),
            frozenset(),
            ((),) * c.logs,
            frozenset(),
            frozenset(),
            0,
            0,
            left,
            (),
            False,
        )

    # -- small steps ----------------------------------------------------------------

    def has(self, w: World, name: str) -> bool:
        return w.left[BUDGETED.index(name)] > 0

    def spend(self, w: World, name: str) -> World:
        i = BUDGETED.index(name)
        return w._replace(left=at(w.left, i, w.left[i] - 1))

    def view(self, w: World, k: int) -> View:
        return self._view(w.zk, k, is_synced=True)

    def _view(self, zk: Zk, k: int, *, is_synced: bool) -> View:
        leader = zk.leader and LeaderSeen(*zk.leader, is_own=zk.leader[0] == k)
        present = tuple(p for p in zk.present if p is not None)
        return View(zk.record, zk.version, leader, present, is_synced)

    def shown(self, w: World) -> World:
        """Write what replicas with a session show of themselves."""
        present = list(w.zk.present)
        for k, proc in enumerate(w.procs):
            if proc is not None and present[k] is not None:
                present[k] = proc.replica.presence()
        return w._replace(zk=w.zk._replace(present=tuple(present)))

    def proc(self, w: World, k: int) -> Proc:
        found = w.procs[k - 1]
        assert found is not None
        return found

    def with_proc(self, w: World, k: int, proc: Proc | None) -> World:
        return w._replace(procs=at(w.procs, k - 1, proc))

    def with_disk(self, w: World, k: int, disk: Disk) -> World:
        return w._replace(disks=at(w.disks, k - 1, disk))

    def with_copy(self, w: World, k: int, i: int, copy: Copy) -> World:
        disk = w.disks[k - 1]
        return self.with_disk(w, k, disk._replace(logs=at(disk.logs, i, copy)))

    def facts(self, w: World, k: int, i: int) -> CopyFacts:
        return w.disks[k - 1].logs[i].facts(self.proc(w, k).hws[i])

    def run(self, w: World, k: int, transition: Transition) -> World:
        """Carry out what a function of the core returned."""
        after, actions = transition
        proc = self.proc(w, k)
        before = proc.replica
        if self.config.breaks("s") and after.pending is not None:
            after = replace(after, pending=_unmarked(after.pending))
        w = self.with_proc(w, k, proc._replace(replica=after))
        if after.is_sure or after.file.flag:
            w = self.with_disk(w, k, w.disks[k - 1]._replace(is_old=False))
        for action in actions:
            w = self._act(w, k, action)
        proc = self.proc(w, k)
        proposed = after.pending is not None and after.pending is not before.pending
        is_flying = after.pending is not None and (proc.is_flying or proposed)
        w = self.with_proc(w, k, proc._replace(is_flying=is_flying))
        if after.term is None:
            w = self.with_proc(w, k, self.proc(w, k)._replace(logs=()))
        elif before.term is not None and before.term.quorum != after.term.quorum:
            gone = before.term.quorum.waited - after.term.quorum.waited
            w = self._forget_joined(w, k, gone)
        return w

    def _forget_joined(self, w: World, k: int, gone: frozenset[int]) -> World:
        proc = self.proc(w, k)
        logs = list(proc.logs)
        for replica in gone:
            logs = [log.leave(replica) for log in logs]
        w = self.with_proc(w, k, proc._replace(logs=tuple(logs)))
        return self.advance(w, k)

    def _act(self, w: World, k: int, action: Any) -> World:
        disk, proc = w.disks[k - 1], self.proc(w, k)
        if isinstance(action, SaveSet):
            return self.with_disk(w, k, disk._replace(file=action.file))
        if isinstance(action, SaveHoldings):
            return self.with_disk(w, k, disk._replace(holdings=action.version))
        if action is SimpleAction.FAIL_IN_FLIGHT and not self.config.breaks("j"):
            w = w._replace(lost=w.lost | proc.tickets)
            return self.with_proc(w, k, proc._replace(tickets=frozenset()))
        if action is SimpleAction.LOWER_WATERMARKS:
            ends = [copy.end for copy in disk.logs]
            hws = tuple(map(min, proc.hws, ends))
            logs = tuple(c._replace(hw=min(c.hw, c.end)) for c in disk.logs)
            w = self.with_disk(w, k, disk._replace(logs=logs))
            return self.with_proc(w, k, proc._replace(hws=hws))
        if isinstance(action, BeginEpoch):
            return self._begin_epoch(w, k, action.epoch)
        return w

    def _begin_epoch(self, w: World, k: int, epoch: Epoch) -> World:
        proc = self.proc(w, k)
        logs = []
        for i, copy in enumerate(w.disks[k - 1].logs):
            log = begin_model_log(self.facts(w, k, i))
            if self.config.breaks("e"):
                log = replace(log, epoch_start=min(log.hw, log.epoch_start))
            logs.append(log)
            table = begin_epoch(copy.table, epoch, copy.end)  # type: ignore[arg-type]
            before = copy.table if self.config.breaks("n") else None
            changed = copy._replace(table=table, old_table=before)
            w = self.with_copy(w, k, i, changed)
        return self.with_proc(w, k, proc._replace(logs=tuple(logs)))

    # -- high watermarks, and answers -------------------------------------------------

    def set_hw(self, w: World, k: int, i: int, hw: int) -> World:
        """Raise the high watermark of a copy, in memory and on disk."""
        proc, copy = self.proc(w, k), w.disks[k - 1].logs[i]
        if hw < proc.hws[i]:
            raise Violation(f"replica {k}: high watermark from {proc.hws[i]} to {hw}")
        w = self.with_proc(w, k, proc._replace(hws=at(proc.hws, i, hw)))
        w = self.with_copy(w, k, i, copy._replace(hw=hw))
        return self._answer(w, k, i, hw)

    def _answer(self, w: World, k: int, i: int, hw: int) -> World:
        """Answer the tickets below a high watermark."""
        proc, copy = self.proc(w, k), w.disks[k - 1].logs[i]
        done = {t for t in proc.tickets if t.log == i and t.end <= hw}
        for ticket in done:
            found = copy.at(ticket.end - 1, ticket.end)
            if found != (ticket.put,) and ticket.end > copy.start:
                raise Violation(
                    f"put {ticket.put} is acknowledged by replica {k}, whose log has"
                    f" {found} at its offset"
                )
            self._check_copies(w, k, ticket)
        if done:
            w = w._replace(acked=w.acked | done)
            left = proc.tickets - done
            w = self.with_proc(w, k, proc._replace(tickets=left))
        return w

    def _check_copies(self, w: World, k: int, ticket: Ticket) -> None:
        """So many replicas as the set says have synced an acknowledged put."""
        leader = self.proc(w, k).replica
        incarnations = dict(leader.term.incarnations) if leader.term is not None else {}
        holders = 0
        for m, (disk, proc) in enumerate(zip(w.disks, w.procs, strict=True), 1):
            copy = disk.logs[ticket.log]
            is_synced = ticket.end <= copy.end - copy.unsynced
            is_there = copy.at(ticket.end - 1, ticket.end) == (ticket.put,)
            # It had synced it, and its disk was damaged before the leader could know.
            is_later = proc is None or proc.replica.incarnation != incarnations.get(m)
            is_damaged = (
                disk.is_suspect or disk.is_old or disk.file is None or disk.file.flag
            )
            is_excused = m in incarnations and is_later and bool(is_damaged)
            is_gone = ticket.end <= copy.start
            holders += (is_synced and is_there) or is_gone or is_excused
        if holders < leader.record.min:
            raise Violation(
                f"put {ticket.put} is acknowledged, and {holders} replicas have it"
            )

    def advance(self, w: World, k: int) -> World:
        """Move the high watermarks of a leader, and commit what is below them."""
        term = self.proc(w, k).replica.term
        if term is None:
            return w
        quorum = term.quorum
        if self.config.breaks("d"):
            quorum = replace(quorum, open=())
        if self.config.breaks("v"):
            quorum = replace(quorum, former=frozenset())
        if self.config.breaks("f"):
            quorum = replace(quorum, min=1)
        for i in range(len(self.proc(w, k).logs)):
            proc = self.proc(w, k)
            before = proc.logs[i]
            if self.config.breaks("d"):
                log = replace(before, joined=frozenset()).advance(quorum)
                log = replace(log, joined=before.joined)
            else:
                log = before.advance(quorum)
            if log.hw == before.hw:
                continue
            w = self.with_proc(w, k, proc._replace(logs=at(proc.logs, i, log)))
            w = self._commit(w, k, i, log.hw)
            w = self.set_hw(w, k, i, log.hw)
        return w

    def _commit(self, w: World, k: int, i: int, hw: int) -> World:
        copy, before = w.disks[k - 1].logs[i], w.committed[i]
        known = before[copy.start : hw]
        if copy.at(copy.start, copy.start + len(known)) != known:
            raise Violation(
                f"leader {k} has {copy.data} from {copy.start} on,"
                f" and {before} is committed"
            )
        if hw <= len(before):
            return w
        fresh = before + copy.at(len(before), hw)
        return w._replace(committed=at(w.committed, i, fresh))


def _unmarked(change: Change) -> Change:
    """Return a change whose record does not say with which revisions epochs began."""
    claims = tuple(claim._replace(revision=10**9) for claim in change.record.claims)
    return replace(change, record=replace(change.record, claims=claims))
