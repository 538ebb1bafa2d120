"""Events of a set: what may happen next in a world, and the world after it."""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

from metaq.replication.election import (
    CLAIM_WAIT_MS,
    MERGE_WAIT_MS,
    Flag,
    merged_watermark,
    tail_from,
)
from metaq.replication.epochs import (
    EpochStart,
    adopt_table,
    entries_within,
    load_table,
)
from metaq.replication.joins import LogPlan, plan_log, refuse
from metaq.replication.progress import (
    NOTHING,
    JoinAnswer,
    answer_join,
    has_lost,
)
from metaq.replication.record import (
    LeaderNode,
    Purpose,
    ReplicaSetError,
    SetRecord,
    plan_force,
    plan_settings,
    restored_record,
)
from metaq.replication.replica import (
    TERM_ROLES,
    DirectoryFindings,
    Replica,
    ReplicaRole,
    SetFile,
    caught_up,
    claim,
    declare_incomplete,
    drain,
    give_up,
    joined,
    lead,
    lead_on,
    leave_sure,
    merged,
    on_applied,
    on_view,
    promise,
    renew,
    saved_by,
    start,
    take_in,
    take_out,
    takes_data,
)
from tests.replication.model_log import ModelLog, begin_model_log
from tests.replication.set_model import (
    NO_LOG,
    SET,
    Ack,
    Copy,
    Disk,
    Move,
    Proc,
    SetModel,
    Ticket,
    Violation,
    World,
    Zk,
    at,
)

R = ReplicaRole
ALL = (1, 2, 3)
LEADS = {R.LEADING, R.DRAINING}


class SetMoves(SetModel):
    """All events."""

    def moves(self, w: World) -> Iterator[Move]:
        """Yield what may happen next, each with the way to the world after it."""
        for k in ALL:
            proc = w.procs[k - 1]
            if proc is None:
                yield from self._moves_down(w, k)
                continue
            if proc.replica.role is R.FROZEN and proc.replica.incarnation == 0:
                yield f"start {k}", partial(self.start, w, k)
                continue
            yield from self._moves_of_zookeeper(w, k, proc)
            role = proc.replica.role
            if role is R.IDLE and w.zk.leader is None and self.has(w, "claims"):
                yield f"claim {k}", partial(self.claim, w, k)
            if role is R.MERGING and not proc.is_flying:
                yield from self._moves_of_merge(w, k, proc)
            if proc.replica.term is not None:
                yield from self._moves_of_leader(w, k, proc)
            yield from self._moves_of_follower(w, k, proc)
            for i, copy in enumerate(w.disks[k - 1].logs):
                if copy.unsynced and self.config.is_early:
                    yield f"sync {k} {i}", partial(self.sync, w, k, i)
            yield from self._moves_of_faults(w, k, proc)
        for ack in sorted(w.net):
            yield f"late ack {self._name(ack)}", partial(self.deliver, w, ack)
        yield from self._moves_of_operator(w)

    @staticmethod
    def _name(ack: Ack) -> str:
        ends = ",".join(map(str, ack.ends))
        return (
            f"{ack.follower}.{ack.incarnation}>{ack.leader} e{ack.epoch.number} {ends}"
        )

    def first(self) -> World:
        """Return the first world, in which replica 1 leads where the model says so."""
        w = super().first()
        if not self.config.is_led:
            return w
        left = w.left
        w = w._replace(left=tuple(9 for _ in left))
        others = sorted(w.zk.record.in_sync - {1})
        w = self.land(self.claim(w, 1), 1, True)
        for m in others:
            w = self.merge(w, 1, m)
        w = self.lead(w, 1)
        for m in others:
            w = self.join(self.read(w, m), m, 1)
        return w._replace(left=left)

    def done(self, w: World) -> World:
        return self.shown(w)

    # -- ZooKeeper --------------------------------------------------------------------

    def _moves_of_zookeeper(self, w: World, k: int, proc: Proc) -> Iterator[Move]:
        if proc.is_flying:
            yield f"answer {k}", partial(self.land, w, k, True)
            if self.has(w, "unknown"):
                yield f"lands unanswered {k}", partial(self.land, w, k, False)
                yield f"gets lost {k}", partial(self.drop, w, k)
        elif self.view_changes(w, k):
            yield f"read {k}", partial(self.read, w, k)
        if w.zk.present[k - 1] is None:
            yield f"session {k}", partial(self.session, w, k)
        elif self.has(w, "expiries"):
            yield f"expire {k}", partial(self.expire, w, k)
        if self.has(w, "stale") and not proc.is_flying:
            for n, old in enumerate(w.old):
                if self._view_changes(w, k, old, is_synced=False):
                    yield f"stale read {k} {n}", partial(self.read, w, k, n)

    def view_changes(self, w: World, k: int) -> bool:
        return self._view_changes(w, k, w.zk, is_synced=True)

    def _view_changes(self, w: World, k: int, zk: Zk, *, is_synced: bool) -> bool:
        replica = self.proc(w, k).replica
        if replica.role is R.FROZEN and replica.incarnation == 0:
            return False
        if is_synced and replica.pending is None and replica.record == zk.record:
            # The cases of most worlds, decided without the core.
            is_there = zk.leader is not None and zk.record.leader != 0
            if replica.role in TERM_ROLES and replica.version == zk.version:
                return False
            follows = replica.role is R.FOLLOWING and replica.stream
            if follows == replica.record.epoch and is_there:
                return False
            if replica.role is R.IDLE and not is_there and not zk.record.forced:
                return False
        return on_view(replica, self._view(zk, k, is_synced=is_synced))[0] != replica

    def read(self, w: World, k: int, old: int | None = None) -> World:
        if old is None:
            zk = w.zk
        else:
            zk, w = w.old[old], self.spend(w, "stale")
        view = self._view(zk, k, is_synced=old is None)
        w = self.run(w, k, on_view(self.proc(w, k).replica, view))
        if old is None:
            w = self._registered(w, k)
        return self.done(self._lead_on(w, k))

    def _registered(self, w: World, k: int) -> World:
        """Write a replica's node where ZooKeeper came back with an old one."""
        replica = self.proc(w, k).replica
        version = max(w.zk.members[k - 1], replica.incarnation)
        if replica.role in {R.STARTING, R.FROZEN}:
            return w
        return w._replace(zk=w.zk._replace(members=at(w.zk.members, k - 1, version)))

    def _lead_on(self, w: World, k: int) -> World:
        replica = self.proc(w, k).replica
        if replica.role is R.DRAINING and replica.pending is None:
            return self.run(w, k, lead_on(replica))
        return w

    def land(self, w: World, k: int, is_answered: bool) -> World:
        """Carry out a change that is on its way, if it fits."""
        if not is_answered:
            w = self.spend(w, "unknown")
        zk = self.landed(w.zk, k, w)
        proc = self.proc(w, k)
        w = self.with_proc(w, k, proc._replace(is_flying=False))
        if zk is None:
            return self.done(w)
        w = self.written(w, zk)
        if is_answered:
            w = self.run(w, k, on_applied(proc.replica))
            w = self._lead_on(w, k)
        return self.done(w)

    def drop(self, w: World, k: int) -> World:
        w = self.spend(w, "unknown")
        return self.with_proc(w, k, self.proc(w, k)._replace(is_flying=False))

    def landed(self, zk: Zk, k: int, w: World) -> Zk | None:
        """Return ZooKeeper after a replica's change; None where it does not fit."""
        replica = self.proc(w, k).replica
        change = replica.pending
        assert change is not None
        is_start = change.purpose is Purpose.REGISTER
        if change.version != zk.version or (zk.present[k - 1] is None and not is_start):
            return None
        if change.member_check is not None and not self.config.breaks("h2"):
            other, version = change.member_check
            if zk.members[other - 1] != version:
                return None
        leader = zk.leader
        if change.leader_node is LeaderNode.CREATED:
            if leader is not None:
                return None
            leader = k, change.record.epoch
        elif change.leader_node is LeaderNode.CHECKED:
            if leader != (k, change.record.epoch):
                return None
        elif change.leader_node is LeaderNode.DELETED:
            leader = None
        members = zk.members
        if change.member is not None:
            members = at(members, change.member[0] - 1, change.member[1])
        if not change.is_check:
            zk = zk._replace(record=change.record, version=zk.version + 1)
        return zk._replace(leader=leader, members=members)

    def written(self, w: World, zk: Zk) -> World:
        """Check what was written, and keep what was there if it may come back."""
        before, after = w.zk.record, zk.record
        if after.revision < before.revision or after.epoch.number < before.epoch.number:
            raise Violation(f"record {before} was followed by {after}")
        is_less = len(after.in_sync) < len(before.in_sync)
        if is_less and len(after.in_sync) < after.min and after.forced == before.forced:
            raise Violation(f"in-sync set {set(after.in_sync)} is below {after.min}")
        for new in after.in_sync - before.in_sync:
            disk, member = w.disks[new - 1], zk.members[new - 1]
            is_told = disk.file is not None and disk.file.flag is Flag.INCOMPLETE
            if is_told and member == disk.holdings and after.forced == before.forced:
                raise Violation(f"replica {new} was taken in, and is incomplete")
        old = w.old
        if self.config.restores or self.config.stale:
            old = (*old, w.zk)[-3:]
        return w._replace(zk=zk, old=old)

    def session(self, w: World, k: int) -> World:
        """A replica without a session has a new one."""
        w = self.with_proc(w, k, self.proc(w, k)._replace(is_flying=False))
        if self.proc(w, k).replica.incarnation:
            w = self.run(w, k, on_view(self.proc(w, k).replica, self.view(w, k)))
            w = self._registered(w, k)
        replica = self.proc(w, k).replica
        present = at(w.zk.present, k - 1, replica.presence())
        w = w._replace(zk=w.zk._replace(present=present))
        if replica.role in TERM_ROLES and w.zk.leader is None:
            renewed = renew(replica)
            if renewed is not None:
                w = self.run(w, k, renewed)
        return self.done(w)

    def expire(self, w: World, k: int) -> World:
        return self._expired(self.spend(w, "expiries"), k)

    def _expired(self, w: World, k: int) -> World:
        zk = w.zk._replace(present=at(w.zk.present, k - 1, None))
        if zk.leader is not None and zk.leader[0] == k:
            zk = zk._replace(leader=None)
        return w._replace(zk=zk)

    # -- claims -----------------------------------------------------------------------

    def claim(self, w: World, k: int) -> World:
        replica = self.proc(w, k).replica
        if self.config.breaks("r"):
            file = replace(replica.file, flag=Flag.NONE)
            replica = replace(replica, file=file)
        view = self.view(w, k)
        if self.config.breaks("r"):
            shown = tuple(replace(p, flag=Flag.NONE) for p in view.presences)
            view = replace(view, presences=shown)
        record = w.zk.record
        nonce = f"{k}.{replica.incarnation}.{record.revision}"
        if self.config.breaks("sure"):
            replica = replace(replica, is_sure=True)
        transition = claim(replica, view, nonce, waited_ms=CLAIM_WAIT_MS)
        if transition is None:
            return w
        w = self._drained(self.spend(w, "claims"), k)
        return self.done(self.run(w, k, transition))

    def _moves_of_merge(self, w: World, k: int, proc: Proc) -> Iterator[Move]:
        merge = proc.replica.merge
        assert merge is not None
        for m in sorted(merge.in_sync - merge.answered):
            if w.procs[m - 1] is not None:
                yield f"merge {k} {m}", partial(self.merge, w, k, m)
        yield f"lead {k}", partial(self.lead, w, k)
        if self.has(w, "give_ups"):
            yield f"give up {k}", partial(self.give_up, w, k)

    def merge(self, w: World, k: int, m: int) -> World:
        """A member answers a claimer, which takes over what it lacks."""
        promised = promise(
            self.proc(w, m).replica, self.proc(w, k).replica.record.epoch
        )
        if promised is None:
            return w
        w = self._drained(self.run(w, m, promised), m)
        lacks_bytes = False
        for i in range(len(w.disks[k - 1].logs)):
            theirs = self.facts(w, m, i)
            mine = self.facts(w, k, i)
            point = tail_from(mine, theirs)
            if point is not None:
                other = w.disks[m - 1].logs[i]
                copy = w.disks[k - 1].logs[i].cut(point)
                if copy.number != other.number:
                    copy = Copy(other.number, (), point, hw=point)
                    w = self._lowered(w, k, i, point)
                table = adopt_table(copy.table, theirs, point)
                data = copy.data + other.at(copy.end, other.end)
                w = self.with_copy(w, k, i, copy._replace(data=data, table=table))
            mine = self.facts(w, k, i)
            if merged_watermark(mine, [theirs.hw]) > mine.end:
                lacks_bytes = True
                continue
            w = self.set_hw(w, k, i, merged_watermark(mine, [theirs.hw]))
        replica = merged(self.proc(w, k).replica, m)
        w = self.with_proc(w, k, self.proc(w, k)._replace(replica=replica))
        if lacks_bytes:
            w = self.run(w, k, declare_incomplete(replica))
            gone = give_up(
                self.proc(w, k).replica, self.view(w, k).presences, lacks_bytes=True
            )
            if gone is not None:
                w = self.run(w, k, gone)
        return self.done(w)

    def lead(self, w: World, k: int) -> World:
        replica = self.proc(w, k).replica
        is_alone = replica.merge is not None and replica.merge.min == 1
        if self.config.breaks("alone"):
            replica = replace(replica, is_sure=True)
        if self.config.breaks("r") or (is_alone and self.config.breaks("t")):
            file = replace(replica.file, flag=Flag.NONE)
            replica = replace(replica, file=file)
        transition = lead(replica, waited_ms=MERGE_WAIT_MS)
        if transition is None:
            return w
        for n, other in enumerate(w.procs, 1):
            term = other.replica.term if other is not None else None
            if n != k and term is not None and term.epoch == replica.record.epoch:
                raise Violation(f"replicas {k} and {n} lead in {term.epoch}")
        forced = replica.record.forced[-1:]
        if forced and forced[0] > w.forced:
            w = self._accept_loss(w, k, forced[0])
        w = self.run(w, k, transition)
        return self.done(self.advance(w, k))

    def _accept_loss(self, w: World, k: int, forced: int) -> World:
        """Bytes that a forced leader lacks are not missed any more."""
        committed = []
        for copy, known in zip(w.disks[k - 1].logs, w.committed, strict=True):
            same = 0
            while same < min(len(known), copy.end) and (
                same < copy.start or copy.at(same, same + 1) == known[same : same + 1]
            ):
                same += 1
            committed.append(known[:same])
        return w._replace(committed=tuple(committed), forced=forced)

    def give_up(self, w: World, k: int) -> World:
        transition = give_up(self.proc(w, k).replica, self.view(w, k).presences)
        if transition is None:
            return w
        return self.done(self.run(self.spend(w, "give_ups"), k, transition))

    # -- leading ----------------------------------------------------------------------

    def _moves_of_leader(self, w: World, k: int, proc: Proc) -> Iterator[Move]:
        replica = proc.replica
        term = replica.term
        assert term is not None
        if replica.role is R.LEADING:
            yield from self._moves_of_puts(w, k, proc)
        if replica.pending is not None:
            return
        for m in sorted(replica.record.replicas - {k}):
            if m in term.quorum.confirmed:
                if self.has(w, "shrinks"):
                    yield f"take out {k} {m}", partial(self.take_out, w, k, m)
            elif self.has(w, "expansions") and all(
                m in log.joined for log in proc.logs
            ):
                yield f"take in {k} {m}", partial(self.take_in, w, k, m)
            if m in replica.record.in_sync and self.has(w, "handovers"):
                yield f"hand over {k} {m}", partial(self.hand_over, w, k, m)
        if self.has(w, "give_ups"):
            yield f"give up {k}", partial(self.give_up, w, k)

    def _moves_of_puts(self, w: World, k: int, proc: Proc) -> Iterator[Move]:
        for i, copy in enumerate(w.disks[k - 1].logs):
            if copy.number == NO_LOG:
                if self.has(w, "births"):
                    yield f"make log {k}", partial(self.make_log, w, k)
                continue
            if w.puts < self.config.puts:
                yield f"put {k} {i}", partial(self.put, w, k, i, 1)
                if self.config.is_wide:
                    yield f"put {k} {i} wide", partial(self.put, w, k, i, 2)
                if self.has(w, "refusals"):
                    yield f"no room {k} {i}", partial(self.no_room, w, k, i)
            if self.has(w, "repeats"):
                for ticket in sorted(w.lost):
                    if ticket.log == i:
                        yield (
                            f"repeat {k} {ticket.put}",
                            partial(self.repeat, w, k, ticket),
                        )
            if self.has(w, "trims") and proc.hws[i] > copy.start:
                yield f"trim {k} {i}", partial(self.trim, w, k, i)

    def put(self, w: World, k: int, i: int, size: int) -> World:
        number = w.puts + 1
        return self.done(self._append(w._replace(puts=number), k, i, number, size))

    def _append(self, w: World, k: int, i: int, number: int, size: int) -> World:
        copy = w.disks[k - 1].logs[i]
        unsynced = copy.unsynced + size if self.config.is_early else 0
        data = copy.data + (number,) * size
        copy = copy._replace(data=data, unsynced=unsynced)
        w = self.with_copy(w, k, i, copy)
        proc = self.proc(w, k)
        log = proc.logs[i].append(copy.end)  # type: ignore[arg-type]
        if not unsynced or self.config.breaks("w"):
            log = log.sync(copy.end)  # type: ignore[arg-type]
        tickets = proc.tickets | {Ticket(number, i, copy.end)}
        proc = proc._replace(logs=at(proc.logs, i, log), tickets=tickets)
        return self.advance(self.with_proc(w, k, proc), k)

    def sync(self, w: World, k: int, i: int) -> World:
        """The sync of what a leader wrote ends; it may lead no more."""
        copy, proc = w.disks[k - 1].logs[i], self.proc(w, k)
        w = self.with_copy(w, k, i, copy._replace(unsynced=0))
        if proc.replica.term is None:
            return self.done(w)
        log = proc.logs[i].sync(copy.end)  # type: ignore[arg-type]
        proc = proc._replace(logs=at(proc.logs, i, log))
        return self.done(self.advance(self.with_proc(w, k, proc), k))

    def _drained(self, w: World, k: int) -> World:
        """Return the world when all that a replica wrote is synced, as it waits for."""
        for i, copy in enumerate(w.disks[k - 1].logs if self.config.is_early else ()):
            w = self.with_copy(w, k, i, copy._replace(unsynced=0))
        return w

    def no_room(self, w: World, k: int, i: int) -> World:
        """A put that is refused; by a broken rule followers have seen its byte."""
        w = self.spend(w, "refusals")._replace(puts=w.puts + 1)
        if self.config.breaks("p"):
            for m in ALL:
                proc = w.procs[m - 1]
                copy = w.disks[m - 1].logs[i]
                follows = proc is not None and takes_data(
                    proc.replica, self.proc(w, k).replica.record.epoch
                )
                if follows and copy.end == w.disks[k - 1].logs[i].end:
                    data = (*copy.data, w.puts)
                    w = self.with_copy(w, m, i, copy._replace(data=data))
        return self.done(w)

    def repeat(self, w: World, k: int, ticket: Ticket) -> World:
        """A client sends a put again that was in doubt."""
        w = self.spend(w, "repeats")
        copy = w.disks[k - 1].logs[ticket.log]
        if ticket.put not in copy.data:
            return self.done(self._append(w, k, ticket.log, ticket.put, 1))
        size = copy.data.count(ticket.put)
        end = copy.start + copy.data.index(ticket.put) + size
        again = ticket._replace(end=end)
        proc = self.proc(w, k)
        if self.config.breaks("o"):
            w = w._replace(acked=w.acked | {again})
            self._check_copies(w, k, again)
            return self.done(w)
        proc = proc._replace(tickets=proc.tickets | {again})
        w = self.with_proc(w, k, proc)
        return self.done(self._answer(w, k, ticket.log, proc.hws[ticket.log]))

    def trim(self, w: World, k: int, i: int) -> World:
        """Retention at the leader: one byte at the log start goes."""
        copy = w.disks[k - 1].logs[i]
        w = self.with_copy(
            self.spend(w, "trims"),
            k,
            i,
            copy._replace(start=copy.start + 1, data=copy.data[1:]),
        )
        return self.done(w)

    def take_out(self, w: World, k: int, m: int) -> World:
        replica = self.proc(w, k).replica
        presences = self.view(w, k).presences
        if self.config.breaks("f2"):
            low_file = replace(replica.file, record=replace(replica.record, min=1))
            low = replace(replica, file=low_file)
            transition = take_out(low, m, presences)
            if transition is not None:
                change = transition[0].pending
                assert change is not None
                record = replace(change.record, min=replica.record.min)
                change = replace(change, record=record)
                transition = (
                    replace(transition[0], file=replica.file, pending=change),
                    transition[1],
                )
        else:
            transition = take_out(replica, m, presences)
        if transition is None:
            return w
        w = self.run(self.spend(w, "shrinks"), k, transition)
        if self.config.breaks("g"):
            replica = self.proc(w, k).replica
            assert replica.pending is not None
            assert replica.term is not None
            quorum = replica.term.quorum.settle(
                replica.pending.record.in_sync, min_in_sync=replica.record.min
            )
            quorum = replace(quorum, former=frozenset())
            replica = replace(replica, term=replace(replica.term, quorum=quorum))
            w = self.with_proc(w, k, self.proc(w, k)._replace(replica=replica))
            w = self.advance(w, k)
        return self.done(w)

    def take_in(self, w: World, k: int, m: int) -> World:
        transition = take_in(self.proc(w, k).replica, m)
        if transition is None:
            return w
        return self.done(self.run(self.spend(w, "expansions"), k, transition))

    def hand_over(self, w: World, k: int, m: int) -> World:
        proc = self.proc(w, k)
        if any(log.hw != log.end for log in proc.logs):
            return w
        if proc.replica.role is R.LEADING:
            w = self.run(self.spend(w, "handovers"), k, drain(proc.replica))
        transition = give_up(
            self.proc(w, k).replica, self.view(w, k).presences, target=m
        )
        if transition is None:
            return w
        return self.done(self.run(w, k, transition))

    # -- following --------------------------------------------------------------------

    def _moves_of_follower(self, w: World, k: int, proc: Proc) -> Iterator[Move]:
        replica = proc.replica
        for n in ALL:
            other = w.procs[n - 1]
            if n == k or other is None or other.replica.term is None:
                continue
            epoch = other.replica.term.epoch
            if takes_data(replica, epoch):
                yield from self._moves_of_stream(w, k, n)
            is_wanted = replica.role is R.FOLLOWING and w.zk.leader is not None
            if is_wanted and replica.record.epoch == epoch and replica.stream != epoch:
                yield f"join {k} {n}", partial(self.join, w, k, n)
                if self.has(w, "crashes") and len(w.committed) > 1:
                    yield (
                        f"join, crash {k} {n}",
                        partial(self.join, w, k, n, is_crash=True),
                    )

    def _moves_of_stream(self, w: World, k: int, n: int) -> Iterator[Move]:
        mine, theirs = self.proc(w, k), self.proc(w, n)
        is_more = is_unsaid = False
        term = theirs.replica.term
        assert term is not None
        revision = self._revision(mine.replica)
        is_unjoined = dict(term.saved).get(k) != revision and bool(term.quorum.former)
        for i, log in enumerate(theirs.logs):
            other, copy = w.disks[n - 1].logs[i], w.disks[k - 1].logs[i]
            if other.number == NO_LOG:
                continue
            is_same = copy.number == other.number
            is_more |= not is_same or copy.end < other.end
            is_more |= mine.hws[i] < min(theirs.hws[i], copy.end)
            is_unsaid |= is_same and log.match_of(k) != copy.end
            is_unjoined |= k not in log.joined
        if is_more or is_unsaid or not mine.replica.is_sure:
            yield f"pull {k} {n}", partial(self.pull, w, k, n)
        if (is_more or is_unsaid) and self.has(w, "late"):
            yield f"pull, ack late {k} {n}", partial(self.pull_late, w, k, n)
        if is_unjoined or not mine.replica.is_sure:
            yield f"ack {k} {n}", partial(self.acknowledge, w, k, n)

    def pulled(self, w: World, k: int, n: int) -> tuple[World, Ack]:
        """Return the world after data of leader n is synced, and what is said of it."""
        for i in range(len(w.committed)):
            other, copy = w.disks[n - 1].logs[i], w.disks[k - 1].logs[i]
            if other.number == NO_LOG:
                continue
            if copy.end < other.start or copy.number != other.number:
                # Gone below, or new: as in a join, from the log start on.
                plan = LogPlan(other.start, other.start, ())  # type: ignore[arg-type]
                w = self._restarted(w, k, n, i, plan)
                copy = w.disks[k - 1].logs[i]
            more = other.at(copy.end, other.end)
            if more:
                unsynced = copy.unsynced + len(more) if self.config.breaks("m") else 0
                table = adopt_table(
                    copy.table,
                    self.facts(w, n, i),
                    copy.end,  # type: ignore[arg-type]
                )
                before = copy.table if table != copy.table else copy.old_table
                copy = copy._replace(
                    data=copy.data + more,
                    unsynced=unsynced,
                    table=table,
                    old_table=before if self.config.breaks("n") else None,
                )
                w = self.with_copy(w, k, i, copy)
            own_hw = self.proc(w, k).hws[i]
            hw = max(own_hw, min(self.proc(w, n).hws[i], copy.end))
            if hw != own_hw:
                w = self.set_hw(w, k, i, hw)
        return self._told(w, k, n)

    def _told(self, w: World, k: int, n: int) -> tuple[World, Ack]:
        """Return the acknowledgement of what is synced, a flag ended where it may."""
        proc = self.proc(w, k)
        ends = tuple(
            copy.end if copy.number == other.number else 0
            for copy, other in zip(
                w.disks[k - 1].logs, w.disks[n - 1].logs, strict=True
            )
        )
        if not proc.replica.is_sure and all(map(int.__ge__, ends, proc.targets)):
            w = self.run(w, k, caught_up(proc.replica))
        replica = self.proc(w, k).replica
        revision = self._revision(replica)
        return w, Ack(n, k, replica.incarnation, replica.stream, ends, revision)

    @staticmethod
    def _revision(replica: Replica) -> int:
        assert replica.file.record is not None
        return replica.file.record.revision

    def acknowledge(self, w: World, k: int, n: int) -> World:
        """A follower says what it has, before it pulls more."""
        return self.done(self._taken(*self._told(w, k, n)))

    def pull(self, w: World, k: int, n: int) -> World:
        return self.done(self._taken(*self.pulled(w, k, n)))

    def pull_late(self, w: World, k: int, n: int) -> World:
        w, ack = self.pulled(self.spend(w, "late"), k, n)
        return self.done(w._replace(net=w.net | {ack}))

    def deliver(self, w: World, ack: Ack) -> World:
        return self.done(self._taken(w._replace(net=w.net - {ack}), ack))

    def _taken(self, w: World, ack: Ack) -> World:
        if self.config.breaks("c"):
            ack = self._made_current(w, ack)
        proc = w.procs[ack.leader - 1]
        term = proc.replica.term if proc is not None else None
        if proc is None or term is None:
            return w
        if not term.takes(ack.follower, ack.incarnation, ack.epoch):
            return w
        logs: list[ModelLog] = list(proc.logs)
        for i, end in enumerate(ack.ends):
            logs[i] = logs[i].acknowledge(ack.follower, end)  # type: ignore[arg-type]
        w = self.with_proc(w, ack.leader, proc._replace(logs=tuple(logs)))
        w = self._saved(w, ack.leader, ack.follower, ack.revision)
        return self.advance(w, ack.leader)

    def _saved(self, w: World, n: int, k: int, revision: int) -> World:
        replica = saved_by(self.proc(w, n).replica, k, revision)
        return self.run(w, n, (replica, ()))

    def _made_current(self, w: World, ack: Ack) -> Ack:
        """Return the message as if a leader of now had asked for it."""
        for n, proc in enumerate(w.procs, 1):
            term = proc.replica.term if proc is not None else None
            life = (
                dict(term.incarnations).get(ack.follower) if term is not None else None
            )
            if term is not None and life is not None:
                return ack._replace(leader=n, incarnation=life, epoch=term.epoch)
        return ack

    def join(self, w: World, k: int, n: int, *, is_crash: bool = False) -> World:
        """A follower joins all logs of a leader: cuts, tables, and the target."""
        w = self._drained(w, k)
        leader, replica = self.proc(w, n).replica, self.proc(w, k).replica
        term = leader.term
        assert term is not None
        if self.config.breaks("a"):
            for i, hw in enumerate(self.proc(w, k).hws):
                w = self.with_copy(w, k, i, w.disks[k - 1].logs[i].cut(hw))
        answers, is_lost = [], False
        logs = list(self.proc(w, n).logs)
        for i, log in enumerate(logs):
            is_nothing = replica.file.flag is Flag.INCOMPLETE
            number = w.disks[k - 1].logs[i].number
            if number and not log.number and self.config.breaks("l"):
                raise Violation(f"log {number} of {k} is deleted: {n} lacks it")
            own = None if is_nothing else self.facts(w, k, i)
            answer = answer_join(log, self.facts(w, n, i), own)
            if self.config.breaks("b") and own is not None:
                point = self._one_look_up(w, k, n, i)
                answer = replace(answer, point=point)  # type: ignore[arg-type]
            is_lost |= has_lost(log, term.quorum, k, answer.point)
            point = answer.point
            if self.config.breaks("q1"):
                point = self.facts(w, k, i).end
            if not self.config.breaks("q") or k not in dict(log.match):
                logs[i] = log.join(k, point)
            answers.append(answer)
        term = term.join(k, replica.incarnation)
        proc = self.proc(w, n)._replace(
            logs=tuple(logs), replica=replace(leader, term=term)
        )
        w = self._saved(self.with_proc(w, n, proc), n, k, self._revision(replica))
        w = self.advance(w, n)
        if is_lost and replica.file.flag is not Flag.INCOMPLETE:
            return self.done(self.run(w, k, declare_incomplete(replica)))
        return self._joined(w, k, n, answers, is_crash=is_crash)

    def _one_look_up(self, w: World, k: int, n: int, i: int) -> int:
        """Return the end, at the leader, of the follower's last epoch (KIP-101)."""
        mine, theirs = self.facts(w, k, i), self.facts(w, n, i)
        last = entries_within(mine.table, mine.start, mine.end)[-1:]
        ends = [
            *(e.start for e in theirs.table if last and e.epoch > last[0].epoch),
            theirs.end,
        ]
        return min(ends[0], mine.end)

    def _joined(
        self, w: World, k: int, n: int, answers: list[JoinAnswer], *, is_crash: bool
    ) -> World:
        replica = self.proc(w, k).replica
        if self.config.breaks("i"):
            for i, copy in enumerate(w.disks[k - 1].logs):
                hw = min(copy.end, self.proc(w, n).hws[i])
                w = self.set_hw(w, k, i, max(hw, self.proc(w, k).hws[i]))
        plans = []
        for i, answer in enumerate(answers):
            if answer.copy.number == NO_LOG:
                continue
            own = self.facts(w, k, i)
            plan = plan_log(replica, own, answer)
            if plan and plan.is_restart and self._keeps_foreign(w, k, i, answer):
                plan = LogPlan(answer.point, own.hw, own.table)
            if plan is None and not self.config.breaks("i"):
                return self.done(self.run(w, k, refuse(replica, i, own, answer)))
            if plan is not None:
                plans.append((i, plan))
        for i, plan in plans[:1] if is_crash else plans:
            if plan.is_restart:
                w = self._restarted(w, k, n, i, plan)
                continue
            copy = w.disks[k - 1].logs[i]
            before = copy.table if self.config.breaks("n") else None
            copy = copy.cut(plan.end)._replace(table=plan.table, old_table=before)
            w = self.with_copy(w, k, i, copy)
            w = self._lowered(w, k, i, plan.hw)
        if is_crash:
            return self.crash(w, k)
        epoch = self.proc(w, n).replica.record.epoch
        after, actions = joined(self.proc(w, k).replica, epoch)
        if self.config.breaks("join") and not after.file.flag:
            after = replace(after, is_sure=True)
        w = self.run(w, k, (after, actions))
        targets: tuple[int, ...] = tuple(answer.target for answer in answers)
        if self.config.breaks("target"):
            targets = self.proc(w, n).hws
        w = self.with_proc(w, k, self.proc(w, k)._replace(targets=targets))
        return self.done(w)

    def _keeps_foreign(self, w: World, k: int, i: int, answer: JoinAnswer) -> bool:
        """Whether bytes below the leader's log start stay without being known equal."""
        is_same = w.disks[k - 1].logs[i].number == answer.copy.number
        flag = self.proc(w, k).replica.file.flag
        return self.config.breaks("u") and is_same and not flag

    def _lowered(self, w: World, k: int, i: int, hw: int) -> World:
        proc, copy = self.proc(w, k), w.disks[k - 1].logs[i]
        if self.config.breaks("i"):
            hw = max(hw, proc.hws[i])
        w = self.with_copy(w, k, i, copy._replace(hw=hw))
        return self.with_proc(w, k, proc._replace(hws=at(proc.hws, i, hw)))

    def _restarted(self, w: World, k: int, n: int, i: int, plan: LogPlan) -> World:
        copy = Copy(w.disks[n - 1].logs[i].number, (), plan.end, plan.table, plan.hw)
        return self._lowered(self.with_copy(w, k, i, copy), k, i, plan.hw)

    # -- crashes and faults -----------------------------------------------------------

    def _moves_of_faults(self, w: World, k: int, proc: Proc) -> Iterator[Move]:
        if k in w.leaving:
            yield f"close {k}", partial(self.close, w, k)
        elif self.has(w, "stops"):
            for steps in (3, 2, 1, 0):
                how = f", {steps} of 3 steps" if steps < 3 else ""
                yield f"leave {k}{how}", partial(self.leave, w, k, steps)
        yield from self._moves_of_backup(w, k)
        if not self.has(w, "crashes"):
            return
        yield f"crash {k}", partial(self.crash, w, k)
        if self._drained(w, k) != w:
            yield f"crash, kept {k}", partial(self.crash, self._drained(w, k), k)
        if proc.is_flying and self.landed(w.zk, k, w) is not None:
            yield f"crash, change lands {k}", partial(self.crash, w, k, True)

    def crash(self, w: World, k: int, lands: bool = False) -> World:
        """A replica dies; its session is there until it expires or it starts again."""
        if lands:
            zk = self.landed(w.zk, k, w)
            assert zk is not None
            w = self.written(w, zk)
        w = self.spend(w, "crashes")
        proc, disk = self.proc(w, k), w.disks[k - 1]
        logs = []
        for copy in disk.logs:
            if copy.unsynced:
                copy = copy.cut(copy.end - copy.unsynced)
            if self.config.breaks("n") and copy.old_table is not None:
                copy = copy._replace(table=copy.old_table)
            logs.append(copy._replace(unsynced=0, old_table=None))
        disk = disk._replace(logs=tuple(logs))
        if self.config.breaks("r2") and disk.file is not None:
            flag = disk.file.flag
            kept = Flag.NONE if flag is Flag.INCOMPLETE else flag
            disk = disk._replace(file=replace(disk.file, flag=kept))
        w = self.with_disk(w, k, disk)._replace(lost=w.lost | proc.tickets)
        return self.with_proc(w._replace(leaving=w.leaving - {k}), k, None)

    def leave(self, w: World, k: int, steps: int) -> World:
        """A replica is about to stop, and says what it knows of its directories.

        What it writes for that may fail at each step; what it does meanwhile goes on.
        """
        w = self.spend(w, "stops")
        w = w._replace(leaving=w.leaving | {k})
        replica = self.proc(w, k).replica
        version = w.disks[k - 1].holdings + 1
        if self.config.breaks("word"):
            replica = replace(replica, is_sure=True)
        transition = leave_sure(replica, version)
        if transition is None or not replica.incarnation:
            return w
        if steps > 0:
            disk = w.disks[k - 1]._replace(holdings=version)
            w = self.with_disk(w, k, disk)
        if steps > 1:
            members = at(w.zk.members, k - 1, version)
            w = w._replace(zk=w.zk._replace(members=members))
        if steps > 2:
            w = self.run(w, k, transition)
        return self.done(w)

    def close(self, w: World, k: int) -> World:
        """A replica ends in good order: all is synced, then its directory is sealed."""
        proc = self.proc(w, k)
        w = self._drained(w, k)._replace(lost=w.lost | proc.tickets)
        w = self._sealed(w, k)
        w = w._replace(leaving=w.leaving - {k})
        return self._expired(self.with_proc(w, k, None), k)

    def _moves_of_backup(self, w: World, k: int) -> Iterator[Move]:
        if self.has(w, "backups") and w.backups[k - 1] is None:
            yield f"back up {k}", partial(self.back_up, w, k)

    def back_up(self, w: World, k: int) -> World:
        """Somebody copies a directory, also of a replica that runs."""
        w = self.spend(w, "backups")
        disk = self._drained(w, k).disks[k - 1]
        return w._replace(backups=at(w.backups, k - 1, disk))

    def put_back(self, w: World, k: int) -> World:
        """The copy comes in the place of the directory."""
        disk = w.backups[k - 1]
        assert disk is not None
        w = w._replace(backups=at(w.backups, k - 1, None))
        return self.with_disk(w, k, disk._replace(is_old=True))

    def _moves_down(self, w: World, k: int) -> Iterator[Move]:
        disk = w.disks[k - 1]
        yield f"start {k}", partial(self.start, w, k)
        if disk.is_sealed and self.has(w, "crashes"):
            opened = self.spend(
                self.with_disk(w, k, disk._replace(is_sealed=False)), "crashes"
            )
            yield f"start, crash {k}", lambda: opened
        if self.has(w, "stops") and (disk.is_sealed or self.config.breaks("void")):
            # What it has not found sealed, and takes no part in, it does not seal.
            closed = self._sealed(self.spend(w, "stops"), k)
            yield f"start, close {k}", lambda: closed
        yield from self._moves_of_backup(w, k)
        is_first = not any(each.is_old or each.is_suspect for each in w.disks)
        if w.backups[k - 1] is not None and is_first:
            yield f"put back {k}", partial(self.put_back, w, k)
        # A session that nobody keeps ends by itself.
        if w.zk.present[k - 1] is not None:
            yield f"session over {k}", partial(self._expired, w, k)
        if disk.file is None or disk.is_suspect:
            return
        if self.has(w, "wipes"):
            yield f"wipe {k}", partial(self.wipe, w, k)
        for i, copy in enumerate(disk.logs):
            if copy.data and self.has(w, "rolls"):
                yield f"roll back {k} {i}", partial(self.roll_back, w, k, i)
            # The only member has no witness: docs/replication.md says what is lost.
            if copy.data and self.has(w, "tears") and w.zk.record.in_sync != {k}:
                yield f"tear {k} {i}", partial(self.tear, w, k, i)

    def _damaged(self, w: World, k: int, name: str, disk: Disk) -> World:
        w = self.with_disk(w, k, disk._replace(is_suspect=True))
        return self.spend(w, name)

    def wipe(self, w: World, k: int) -> World:
        """An empty disk is in the place of the old one."""
        copies = tuple(Copy(copy.number) for copy in w.disks[k - 1].logs)
        return self._damaged(w, k, "wipes", Disk(None, 0, copies))

    def roll_back(self, w: World, k: int, i: int) -> World:
        """A backup is copied back: older bytes under an older holdings version."""
        disk = w.disks[k - 1]
        logs = list(disk.logs)
        logs[i] = logs[i].cut(logs[i].end - 1)
        version = w.zk.members[k - 1] - 1
        disk = disk._replace(logs=tuple(logs), holdings=version)
        return self._damaged(w, k, "rolls", disk)

    def tear(self, w: World, k: int, i: int) -> World:
        """The end of a log is gone or broken after a power cut."""
        disk = w.disks[k - 1]
        logs = list(disk.logs)
        cut = logs[i].cut(logs[i].end - 1)
        # What the replica knew of the high watermark is an older state as well.
        logs[i] = cut._replace(hw=min(cut.hw, cut.start))
        disk = disk._replace(logs=tuple(logs), is_torn=True)
        return self._damaged(w, k, "tears", disk)

    def _sealed(self, w: World, k: int) -> World:
        return self.with_disk(w, k, w.disks[k - 1]._replace(is_sealed=True))

    def start(self, w: World, k: int) -> World:
        disk = w.disks[k - 1]
        file = disk.file or SetFile(SET, k)
        is_cut = disk.is_torn and not self.config.breaks("k")
        if is_cut and not file.flag:
            # Before the tail goes, and also where the record is not believed.
            file = replace(file, flag=Flag.CUT)
            disk = disk._replace(file=file)
        members = w.zk.members[k - 1]
        findings = DirectoryFindings(
            is_known=disk.holdings > 0,
            holdings_version=disk.holdings,
            member_version=disk.holdings if self.config.breaks("h") else members,
            lacks_bytes=any(copy.hw > copy.end for copy in disk.logs),
            is_cut=is_cut,
            is_sealed=disk.is_sealed or self.config.breaks("seal"),
        )
        logs = tuple(
            copy._replace(
                table=load_table(copy.table, start=copy.start, end=copy.end)  # type: ignore[arg-type]
            )
            for copy in disk.logs
        )
        disk = disk._replace(
            logs=logs, is_torn=False, is_suspect=False, is_sealed=False
        )
        # Its directory is locked, so its former life is over.
        w = self._expired(self.with_disk(w, k, disk), k)
        replica, actions = start(file, findings, self.view(w, k))
        hws = tuple(min(max(copy.hw, copy.start), copy.end) for copy in logs)
        w = self.with_proc(w, k, Proc(replica, hws))
        w = self.run(w, k, (replica, actions))
        if replica.pending is not None:
            zk = self.landed(w.zk, k, w)
            assert zk is not None
            w = self.written(w, zk)
            w = self.with_proc(w, k, self.proc(w, k)._replace(is_flying=False))
            w = self.run(w, k, on_applied(replica))
        present = at(w.zk.present, k - 1, self.proc(w, k).replica.presence())
        return self.done(w._replace(zk=w.zk._replace(present=present)))

    # -- operators --------------------------------------------------------------------

    def _moves_of_operator(self, w: World) -> Iterator[Move]:
        if self.has(w, "settings"):
            for size in (1, 2, 3):
                if size != w.zk.record.min and len(w.zk.record.in_sync) >= size:
                    yield f"set min {size}", partial(self.set_min, w, size)
        if self.has(w, "forces"):
            for k in ALL:
                if w.procs[k - 1] is not None:
                    yield f"force {k}", partial(self.force, w, k)
        if self.has(w, "restores"):
            for n in range(len(w.old)):
                yield f"ZooKeeper set back {n}", partial(self.set_back, w, n)
        frozen = [p for p in w.procs if p and p.replica.role is R.FROZEN]
        if frozen and self.restored(w) is not None:
            yield "restore", partial(self.restore, w)

    def set_min(self, w: World, size: int) -> World:
        change = plan_settings(w.zk.record, w.zk.version, min_in_sync=size)
        w = self.spend(w, "settings")
        zk = w.zk._replace(record=change.record, version=w.zk.version + 1)
        return self.written(w, zk)

    def force(self, w: World, k: int) -> World:
        nonce = f"force.{w.zk.record.revision}"
        change = plan_force(w.zk.record, w.zk.version, k, nonce)
        w = self.spend(w, "forces")
        zk = w.zk._replace(record=change.record, version=w.zk.version + 1, leader=None)
        return self.written(w, zk)

    def set_back(self, w: World, n: int) -> World:
        """ZooKeeper comes back from a backup: all sessions end, nodes are older."""
        old = w.old[n]
        w = self.spend(w, "restores")
        zk = old._replace(leader=None, present=(None,) * len(ALL))
        return w._replace(zk=zk, old=(), is_back=True)

    @staticmethod
    def restored(w: World) -> SetRecord | None:
        copies = {
            k: disk.file.record
            for k, disk in enumerate(w.disks, 1)
            if disk.file is not None and disk.file.record is not None
        }
        completed = {
            k: disk.file.completed
            for k, disk in enumerate(w.disks, 1)
            if disk.file is not None and not disk.file.flag
        }
        missing = frozenset(ALL) - copies.keys()
        nonce = f"restore.{w.zk.version}"
        try:
            return restored_record(
                copies,
                w.zk.record,
                completed=completed,
                missing=missing,
                nonce=nonce,
            )
        except ReplicaSetError:
            return None

    def restore(self, w: World) -> World:
        """An operator has all replicas up, and writes the record from their copies."""
        record = self.restored(w)
        assert record is not None
        zk = w.zk._replace(record=record, version=w.zk.version + 1, leader=None)
        return w._replace(zk=zk, old=(), is_back=False)

    def make_log(self, w: World, k: int) -> World:
        """The leader makes the last log, which nobody has."""
        w, i = self.spend(w, "births"), len(w.committed) - 1
        epoch = self.proc(w, k).replica.record.epoch
        table = (EpochStart(epoch, NOTHING),)
        w = self.with_copy(w, k, i, Copy(10 * epoch.number + k, table=table))
        proc = self.proc(w, k)
        log = begin_model_log(self.facts(w, k, i))
        w = self.with_proc(w, k, proc._replace(logs=at(proc.logs, i, log)))
        return self.done(w)
