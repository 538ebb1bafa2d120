"""Commands of an operator on a set, and the facts that its replicas report.

A command is not a member of the set: it reads the nodes in ZooKeeper, proposes one
change of the record, and watches the result. If a reply is lost, the result is read
after a sync. If other changes were faster, the change is planned again from the new
record.

The facts of a replica come from `stats replica`, in any role: even a frozen replica
shows its copy of the record and the ends of its logs, which `restore` and `elect` need.
"""

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Final, NamedTuple

from metaq.clock import Clock
from metaq.errors import CoordinationError, MetaqError
from metaq.fs import FileSystem
from metaq.fs.frame_file import encode_frame, encode_header
from metaq.model import GroupOffset, LogId, MessageId, Millis, Offset, TopicPartition
from metaq.peer.options import ConnectionOptions
from metaq.peer.pool import open_connection
from metaq.peer.replies import require_ok
from metaq.protocol.commands import Stats
from metaq.replication.election import Presence, newer_copy
from metaq.replication.epoch_journal import (
    ENTRIES,
    EPOCHS_FILE,
    MAGIC,
    LogCreated,
    encode_entries,
)
from metaq.replication.epochs import Epoch
from metaq.replication.facts import ITEM, HeldLog, ReplicaFacts, decode_facts
from metaq.replication.record import (
    SET_FILE,
    Change,
    ReplicaSetError,
    SetRecord,
    foreign_reason,
)
from metaq.replication.replica import SetFile
from metaq.replication.set_file import read_set_file, write_set_file
from metaq.replication.set_nodes import Member, Outcome, SetNodes, SetView
from metaq.storage.holdings import HOLDINGS_FILE, Holdings
from metaq.storage.inventory import IDENTITY_BYTES, read_holdings, write_holdings
from metaq.storage.opening import find_logs
from metaq.storage.segment import META_SUFFIX, segment_file_name
from metaq.storage.set_aside import ASIDE_DIRECTORY, set_aside
from metaq.storage.watermarks import WATERMARKS_NAME
from metaq.zk.errors import PayloadError
from metaq.zk.groups import list_groups
from metaq.zk.offsets import GroupOffsets
from metaq.zk.znodes import decode_address

TRIES: Final = 10
"""Number of changes by others after which a command gives up."""
POLL_S: Final = 0.1
"""Interval of reads while waiting for the result of a change, in seconds."""
NO_MEMBERS: Final[Mapping[int, Member]] = MappingProxyType({})
NO_MESSAGE: Final = MessageId(-1)
"""Id written by MetaQ's clients if no message was read yet."""
NUMBER_BYTES: Final = 8
"""Size of a log number, in bytes; drawn at random."""


async def ask_replicas(
    view: SetView, clock: Clock, *, timeout_s: float
) -> tuple[dict[int, ReplicaFacts], dict[int, MetaqError]]:
    """Return the facts of the present replicas, and the errors of those without."""
    deadline_s = clock.monotonic_s() + timeout_s
    facts, errors = dict[int, ReplicaFacts](), dict[int, MetaqError]()

    async def ask(replica: int, address: str) -> None:
        try:
            connection = await open_connection(
                decode_address(address.encode()),
                clock=clock,
                deadline_s=deadline_s,
                options=ConnectionOptions(),
            )
            try:
                command = Stats(ITEM, connection.next_opaque())
                reply = await connection.call(command, deadline_s=deadline_s)
                facts[replica] = decode_facts(require_ok(reply).text)
            finally:
                connection.close("asked")
        except MetaqError as error:
            errors[replica] = error

    await asyncio.gather(*(ask(k, each.address) for k, each in view.shown.items()))
    return facts, errors


class LogLoss(NamedTuple):
    """Bytes of a log that another replica has and the chosen one lacks."""

    name: str
    end: int
    """Log end on the chosen replica; 0 if it has no such log."""
    other_end: int
    """Greatest log end on the others."""
    hw: int
    """Greatest known high watermark: bytes below it were acknowledged."""
    replicas: tuple[int, ...]
    """Replicas that have more."""


def find_losses(facts: Mapping[int, ReplicaFacts], chosen: int) -> list[LogLoss]:
    """Return the losses if only one replica's logs remained. Pure.

    Args:
        facts: facts of the present replicas, including the chosen one.
        chosen: the replica whose logs would remain.
    """
    own = {log.name: log for log in facts[chosen].logs}
    ends: dict[str, dict[int, HeldLog]] = {}
    for replica, each in facts.items():
        for log in each.logs:
            ends.setdefault(log.name, {})[replica] = log
    found = []
    for name, logs in sorted(ends.items()):
        mine = own.get(name)
        # A log with the same name and another number is another log.
        more = {
            replica: log
            for replica, log in logs.items()
            if mine is None or log.number != mine.number or log.end > mine.end
            if replica != chosen
        }
        hw = max(log.hw for log in logs.values())
        end = mine.end if mine else 0
        if more or hw > end:
            other = max((log.end for log in more.values()), default=end)
            found.append(LogLoss(name, end, other, hw, tuple(sorted(more))))
    return found


def follows_from_all(
    record: SetRecord,
    copies: Mapping[int, SetRecord],
    presences: Iterable[Presence],
) -> bool:
    """Return whether no present replica has a reason to freeze. Pure."""
    foreign = any(foreign_reason(copy, record) for copy in copies.values())
    return not foreign and newer_copy(record, presences) is None


class OffsetAbove(NamedTuple):
    """A group's offset above the end that a log has after a forced election."""

    group: str
    partition: TopicPartition
    committed: Offset
    end: Offset


async def find_offsets_above(
    nodes: SetNodes, ends: Mapping[str, int], *, deadline_s: float
) -> list[OffsetAbove]:
    """Return the committed offsets in partitions of a set that are above its log ends.

    If they are not lowered, their groups skip the next puts, or start at the log start
    if they read before that.

    Args:
        nodes: nodes of the set, for a command.
        ends: log → end, from the replica with the remaining data; 0 for others.
        deadline_s: when to give up.

    Raises:
        CoordinationError: ZooKeeper does not reply.
    """
    coordinator, paths, found = nodes.coordinator, nodes.paths, []
    for group in await list_groups(coordinator, paths, deadline_s=deadline_s):
        offsets = GroupOffsets(coordinator, paths, group=group)
        for topic in await offsets.topics(deadline_s=deadline_s):
            for each in await offsets.partitions(topic, deadline_s=deadline_s):
                if each.broker_id != nodes.broker_id:
                    continue
                end = Offset(ends.get(str(LogId(topic, each.partition)), 0))
                with suppress(PayloadError):  # no group can use it
                    stored = await offsets.read_offset(each, deadline_s=deadline_s)
                    if stored is not None and stored.offset > end:
                        found.append(OffsetAbove(group, each, stored.offset, end))
    return found


async def lower_offsets(
    nodes: SetNodes, above: Iterable[OffsetAbove], *, deadline_s: float
) -> None:
    """Set the offsets of groups to the ends of the logs; may be repeated.

    Raises:
        CoordinationError: ZooKeeper does not reply.
    """
    for each in above:
        offsets = GroupOffsets(nodes.coordinator, nodes.paths, group=each.group)
        lowered = GroupOffset(each.end, NO_MESSAGE)
        await offsets.set_offset(each.partition, lowered, deadline_s=deadline_s)


# -- changes of the record ------------------------------------------------------------

Plan = Callable[[SetView, SetRecord], Change | None]
"""Return the change of the record as read; None if no change is needed any more."""


async def change_set(
    nodes: SetNodes,
    plan: Plan,
    *,
    first: SetRecord | None = None,
    members: Mapping[int, Member] = NO_MEMBERS,
) -> SetRecord:
    """Change the record, and return the record after the change.

    Args:
        nodes: nodes of the set, for a command.
        plan: called again if others were faster or a reply was lost.
        first: the record to create if there is none; None: that is an error.
        members: replicas whose data is known; their nodes are created with `first`.

    Raises:
        ReplicaSetError: there is no set, or as `plan`.
        CoordinationError: ZooKeeper does not reply, or others are always faster.
    """
    for _ in range(TRIES):
        view = await nodes.read(synced=True)
        record = view.view.record
        if record is not None:
            change = plan(view, record)
            if change is None:
                return record
            after = change.record
            outcome = await nodes.propose(change)
        elif first is not None:
            after = first
            outcome = await nodes.create_record(first, members)
        else:
            raise ReplicaSetError(
                "ZooKeeper has no record of this set: 'metaq replicas init' creates"
                " one, 'metaq replicas restore' restores a lost one"
            )
        if outcome is Outcome.APPLIED:
            return after
    raise CoordinationError(f"the set changed {TRIES} times in this call: try again")


async def wait_until_leads(nodes: SetNodes, replica: int, *, timeout_s: float) -> bool:
    """Wait until a replica leads; return whether it does within the time-out."""
    until_s = nodes.clock.monotonic_s() + timeout_s
    while True:
        view = await nodes.read(synced=False)
        leader = view.view.leader
        if leader is not None and leader.replica == replica:
            return True
        if nodes.clock.monotonic_s() > until_s:
            return False
        await asyncio.sleep(POLL_S)


# -- data directories, while no broker runs there -------------------------------------


def begin_set(
    fs: FileSystem,
    paths: Sequence[Path],
    record: SetRecord,
    replica: int,
    now_ms: Millis,
    *,
    found: SetRecord | None,
    draw: Callable[[int], bytes],
) -> tuple[SetRecord, Member]:
    """Make data directories those of a set's first replica. Blocks; repeatable.

    Args:
        fs: the disk.
        paths: all data directories, the one of the `set` file first; locked.
        record: record of a new set.
        replica: number of this replica.
        now_ms: wall clock.
        found: the record in ZooKeeper.
        draw: returns the given number of random bytes, never the same.

    Returns:
        The record of the set, from an earlier attempt if there was one; and the payload
        of the replica's node.

    Raises:
        ReplicaSetError: there is another set, or this one has already started.
        StorageError: the disk failed; a repeated call continues.
    """
    file = read_set_file(fs, paths[0])
    begun = file.record if file else None
    if file is not None and begun is not None:
        if begun.revision != 1 or file.replica != replica:
            raise ReplicaSetError(
                f"{paths[0]} is replica {file.replica} of set {file.set_id} already"
            )
        record = begun
    if found is not None and found.set_id != record.set_id:
        raise ReplicaSetError(
            f"set {found.set_id} of replicas {sorted(found.replicas)} exists already:"
            " to join it, start a replica on an empty data directory"
        )
    number = record.epoch.number
    file = SetFile(record.set_id, replica, record, epoch=number, completed=number)
    directories = {}
    for path in paths if found is None else ():
        held = read_holdings(fs, path) or Holdings(identity="", written_ms=now_ms)
        identity = held.identity or draw(IDENTITY_BYTES).hex()
        write_holdings(fs, path, replace(held, identity=identity, version=1))
        directories[identity] = 1
        _write_new_logs(fs, path, record.epoch, draw)
    if found is None:
        write_set_file(fs, paths[0], file)
    return found or record, Member(record.set_id, directories, incarnation=1)


def _write_new_logs(
    fs: FileSystem, path: Path, epoch: Epoch, draw: Callable[[int], bytes]
) -> None:
    """Give each log of a data directory a number, and an epoch from its log start."""
    created = []
    for name, log_id in find_logs(fs, path).items():
        files = fs.list_directory(path / name)
        bases = [int(each[:-5]) for each in files if each.endswith(META_SUFFIX)]
        if not bases:
            # A known log without a segment would count as lost.
            first = path / name / segment_file_name(Offset(0))
            fs.open_append(first, create=True).close()
        start = Offset(min(bases, default=0))
        number = int.from_bytes(draw(NUMBER_BYTES))
        created.append(LogCreated(number, log_id, start, epoch))
    frame = encode_frame(ENTRIES, 0, encode_entries(created)) if created else b""
    fs.write_atomically(path / EPOCHS_FILE, encode_header(MAGIC) + frame)


def leave_set(fs: FileSystem, paths: Sequence[Path], now_ms: Millis) -> int:
    """Move the logs of data directories aside, and delete the files of their set.

    Blocks; may be repeated. The next start finds empty directories, and joins.

    Returns:
        The number of moved logs.
    """
    count = 0
    for path in paths:
        count += len(find_logs(fs, path))
        set_aside(fs, path, lambda _: True, now_ms, holding=ASIDE_DIRECTORY)
    for path in paths:
        for name in (SET_FILE, EPOCHS_FILE, WATERMARKS_NAME, HOLDINGS_FILE):
            fs.discard(path / name)
    return count
