"""Acts of an operator on a set, and what its replicas say of themselves.

A command has no part in a set: it reads the nodes in ZooKeeper, proposes one change of
the record, and watches what becomes of it. An answer that got lost is looked up after a
sync, and a change that others were faster than is planned again from what is there.

Facts of a replica come by `stats replica`, in any role: also a frozen one shows its
copy of the record and the ends of its logs, which `restore` and `elect` need.
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
    Born,
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
"""Changes of others that a command yields to."""
POLL_S: Final = 0.1
"""Interval of looks at what becomes of a change."""
NO_MEMBERS: Final[Mapping[int, Member]] = MappingProxyType({})
NO_MESSAGE: Final = MessageId(-1)
"""Written by MetaQ's clients as the id when no message was read yet."""
NUMBER_BYTES: Final = 8
"""Size of a log number, drawn at random."""


async def ask_replicas(
    view: SetView, clock: Clock, *, timeout_s: float
) -> tuple[dict[int, ReplicaFacts], dict[int, MetaqError]]:
    """Return the facts of the replicas that are there, and why others gave none."""
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
    """Bytes of a log that some replica has, and the chosen one lacks."""

    name: str
    end: int
    """Of the chosen replica; 0 where it has no such log."""
    other_end: int
    """Greatest end of the others."""
    hw: int
    """Greatest high watermark known: what is below it was acknowledged."""
    replicas: tuple[int, ...]
    """Those that have more."""


def find_losses(facts: Mapping[int, ReplicaFacts], chosen: int) -> list[LogLoss]:
    """Return what would be lost if one replica's logs were all that there is. Pure.

    Args:
        facts: of the replicas that are there, the chosen one among them.
        chosen: that replica.
    """
    own = {log.name: log for log in facts[chosen].logs}
    ends: dict[str, dict[int, HeldLog]] = {}
    for replica, each in facts.items():
        for log in each.logs:
            ends.setdefault(log.name, {})[replica] = log
    found = []
    for name, logs in sorted(ends.items()):
        mine = own.get(name)
        # Of two logs with one name the other one is another log.
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
    """Return whether no replica that is there has a reason to freeze. Pure."""
    foreign = any(foreign_reason(copy, record) for copy in copies.values())
    return not foreign and newer_copy(record, presences) is None


class OffsetAbove(NamedTuple):
    """Offset of a group above the end that a log has after an election by force."""

    group: str
    partition: TopicPartition
    committed: Offset
    end: Offset


async def find_offsets_above(
    nodes: SetNodes, ends: Mapping[str, int], *, deadline_s: float
) -> list[OffsetAbove]:
    """Return the committed offsets in partitions of a set that are above its log ends.

    Left alone, their groups would pass over what is put there next, or begin at the log
    start if they come before that.

    Args:
        nodes: of a command.
        ends: log → end, of the replica that has what is left; others have no log.
        deadline_s: when to give up.

    Raises:
        CoordinationError: ZooKeeper does not answer.
    """
    coordinator, paths, found = nodes.coordinator, nodes.paths, []
    for group in await list_groups(coordinator, paths, deadline_s=deadline_s):
        offsets = GroupOffsets(coordinator, paths, group=group)
        for topic in await offsets.topics(deadline_s=deadline_s):
            for each in await offsets.partitions(topic, deadline_s=deadline_s):
                if each.broker_id != nodes.broker_id:
                    continue
                end = Offset(ends.get(str(LogId(topic, each.partition)), 0))
                with suppress(PayloadError):  # no group goes on there
                    stored = await offsets.read_offset(each, deadline_s=deadline_s)
                    if stored is not None and stored.offset > end:
                        found.append(OffsetAbove(group, each, stored.offset, end))
    return found


async def lower_offsets(
    nodes: SetNodes, above: Iterable[OffsetAbove], *, deadline_s: float
) -> None:
    """Have groups go on at the ends of the logs; may be repeated.

    Raises:
        CoordinationError: ZooKeeper does not answer.
    """
    for each in above:
        offsets = GroupOffsets(nodes.coordinator, nodes.paths, group=each.group)
        lowered = GroupOffset(each.end, NO_MESSAGE)
        await offsets.set_offset(each.partition, lowered, deadline_s=deadline_s)


# -- changes of the record ------------------------------------------------------------

Plan = Callable[[SetView, SetRecord], Change | None]
"""Return the change of what was read; None where nothing is to be done any more."""


async def change_set(
    nodes: SetNodes,
    plan: Plan,
    *,
    first: SetRecord | None = None,
    members: Mapping[int, Member] = NO_MEMBERS,
) -> SetRecord:
    """Carry out a change of the record, and return the record after it.

    Args:
        nodes: of a command.
        plan: called again where others were faster, or an answer got lost.
        first: the record that is made where there is none. None: that is an error.
        members: replicas whose data is known; they are made with the first record.

    Raises:
        ReplicaSetError: there is no set, or as `plan`.
        CoordinationError: ZooKeeper does not answer, or others are always faster.
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
                "ZooKeeper has no record of this set: 'metaq replicas init' makes one,"
                " 'metaq replicas restore' brings back one that was lost"
            )
        if outcome is Outcome.LANDED:
            return after
    raise CoordinationError(f"the set changed {TRIES} times in this call: try again")


async def wait_until_leads(nodes: SetNodes, replica: int, *, timeout_s: float) -> bool:
    """Return whether a replica leads within a time."""
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
    """Make the directories those of a set's first replica. Blocks; may be repeated.

    Args:
        fs: the disk.
        paths: all data directories, that of the `set` file first; locked.
        record: of a new set.
        replica: which of its replicas this is.
        now_ms: wall clock.
        found: the record in ZooKeeper.
        draw: returns so many random bytes, never the same.

    Returns:
        The record of the set, of an earlier try if there was one; and the replica's
        node.

    Raises:
        ReplicaSetError: there is another set, or this one has begun already.
        StorageError: the disk refuses; the next try goes on.
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
            f"there is a set {found.set_id} of replicas {sorted(found.replicas)}: a"
            " replica joins it by being started, on an empty data directory"
        )
    number = record.epoch.number
    file = SetFile(record.set_id, replica, record, epoch=number, completed=number)
    directories = {}
    for path in paths if found is None else ():
        held = read_holdings(fs, path) or Holdings(identity="", written_ms=now_ms)
        identity = held.identity or draw(IDENTITY_BYTES).hex()
        write_holdings(fs, path, replace(held, identity=identity, version=1))
        directories[identity] = 1
        _write_births(fs, path, record.epoch, draw)
    if found is None:
        write_set_file(fs, paths[0], file)
    return found or record, Member(record.set_id, directories, incarnation=1)


def _write_births(
    fs: FileSystem, path: Path, epoch: Epoch, draw: Callable[[int], bytes]
) -> None:
    """Give each log of a data directory a number, and an epoch from its start on."""
    births = []
    for name, log_id in find_logs(fs, path).items():
        files = fs.list_directory(path / name)
        bases = [int(each[:-5]) for each in files if each.endswith(META_SUFFIX)]
        if not bases:
            # What is known and has no segment would count as lost.
            first = path / name / segment_file_name(Offset(0))
            fs.open_append(first, create=True).close()
        start = Offset(min(bases, default=0))
        number = int.from_bytes(draw(NUMBER_BYTES))
        births.append(Born(number, log_id, start, epoch))
    frame = encode_frame(ENTRIES, 0, encode_entries(births)) if births else b""
    fs.write_atomically(path / EPOCHS_FILE, encode_header(MAGIC) + frame)


def leave_set(fs: FileSystem, paths: Sequence[Path], now_ms: Millis) -> int:
    """Move the logs of data directories aside, and forget what they belonged to.

    Blocks; may be repeated. The next start finds nothing there, and joins.

    Returns:
        The number of logs that were moved.
    """
    count = 0
    for path in paths:
        count += len(find_logs(fs, path))
        set_aside(fs, path, lambda _: True, now_ms, holding=ASIDE_DIRECTORY)
    for path in paths:
        for name in (SET_FILE, EPOCHS_FILE, WATERMARKS_NAME, HOLDINGS_FILE):
            fs.discard(path / name)
    return count
