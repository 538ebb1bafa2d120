"""`metaq replicas`: show and administer the replicas of a broker.

Most commands use ZooKeeper, and ask the replicas registered there; `init` and `join`
change data directories on this machine, where no broker may be running.
"""

import asyncio
import contextlib
import secrets
import uuid
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeVar

import click

from metaq.broker.set_making import find_unfinished
from metaq.cli import render
from metaq.cli.cluster import Target, open_session
from metaq.cli.options import FILE, flag, pairs_option, read_bytes
from metaq.cli.tree import ListingGroup, command
from metaq.clock import Clock, SystemClock
from metaq.config.load import load_config
from metaq.config.settings import BrokerConfig
from metaq.errors import ConfigError, CoordinationError, MetaqError, NoBrokerError
from metaq.fs import SystemFileSystem
from metaq.model import BrokerId
from metaq.replication.election import counted
from metaq.replication.facts import ReplicaFacts
from metaq.replication.joins import check_newcomer
from metaq.replication.operator import (
    OffsetAbove,
    Plan,
    ask_replicas,
    begin_set,
    change_set,
    find_losses,
    find_offsets_above,
    follows_from_all,
    leave_set,
    lower_offsets,
    wait_until_leads,
)
from metaq.replication.record import (
    NO_REPLICA,
    REPLICA_MAX,
    Change,
    LeaderNode,
    Purpose,
    ReplicaSetError,
    SetRecord,
    make_record,
    plan_force,
    plan_settings,
    plan_transfer,
    restored_record,
)
from metaq.replication.set_nodes import SetNodes, SetView
from metaq.retry import Backoff, retry
from metaq.storage.opening import data_paths, find_logs
from metaq.zk.paths import NodePaths, normalize_root
from metaq.zk.session import Coordinator

LEADS_S: Final = 30.0
"""Time for the chosen replica to become the leader."""
OFFSETS_S: Final = 60.0
"""Timeout for reading or lowering the committed offsets of all groups."""
MIN_IN_SYNC: Final = 2
COLUMNS: Final = (
    "id", "state", "role", "is_in_sync", "flag", "address", "epoch", "revision",
    "damaged", "mended", "end_bytes", "lag_bytes", "lag_s", "reason",
)  # fmt: skip
LOSS_COLUMNS: Final = ("log", "end", "other_end", "high_watermark", "replicas")

T = TypeVar("T")
Facts = dict[int, ReplicaFacts]

REPLICA: Final = click.IntRange(1, REPLICA_MAX)


def replica_option(
    word: str, name: str, text: str, **more: Any
) -> Callable[[Callable[..., T]], Callable[..., T]]:
    """Return an option whose value is a replica's number, or a number of replicas."""
    return click.option(word, name, type=REPLICA, help=text, **more)


MIN_TEXT: Final = "Number of replicas that must have a put before it is acknowledged."
replica_argument = click.argument("replica", type=REPLICA)
min_option = replica_option("--min", "min_in_sync", MIN_TEXT)
id_option = click.option(
    "--id",
    "broker_id",
    type=click.IntRange(0),
    help="Broker id of the set.  [default: the only set]",
)
config_option = click.option(
    "--config",
    "path",
    required=True,
    type=FILE,
    help="Configuration file of the replica.",
)
settings_option = pairs_option("--set", "settings", "Override a key")


# -- the set in ZooKeeper -------------------------------------------------------------


def at_set(
    target: Target, broker_id: int | None, work: Callable[[SetNodes], Awaitable[T]]
) -> T:
    """Run a function with the nodes of one set, once ZooKeeper answers.

    Args:
        target: the cluster; must not have brokers.
        broker_id: broker id of the set; None: the only set.
        work: function of the nodes.

    Raises:
        ReplicaSetError: no broker id was given, and there is not exactly one set.
        NoBrokerError: ZooKeeper does not answer.
        CoordinationError: ZooKeeper has stopped answering.
    """
    if target.brokers:
        raise click.UsageError("replicas are found in ZooKeeper: leave out --broker")

    async def run() -> T:
        clock, paths = SystemClock(), NodePaths(normalize_root(target.root))
        session = open_session(target.zookeeper, clock, make=target.coordinator)
        async with session as coordinator:

            def nodes_of(one: int) -> SetNodes:
                broker = BrokerId(one)
                return SetNodes(coordinator, paths, broker, NO_REPLICA, clock=clock)

            until_s = clock.monotonic_s() + target.timeout_s
            try:
                sets = await retry(
                    partial(nodes_of(0).list_sets, deadline_s=until_s),
                    backoff=Backoff(first_s=0.05, max_s=0.5),
                    deadline_s=until_s,
                    clock=clock,
                )
            except CoordinationError as error:
                raise NoBrokerError(target.no_answer()) from error
            if broker_id is None and len(sets) != 1:
                raise ReplicaSetError(
                    f"expected one replica set below {paths.replica_sets()}, got"
                    f" {_numbers(sets)}: name it with --id"
                    if sets
                    else f"there is no replica set below {paths.replica_sets()}:"
                    " 'metaq replicas init' makes one, --zk-root names another root"
                )
            (chosen,) = sets if broker_id is None else (broker_id,)
            return await work(nodes_of(chosen))

    return asyncio.run(run())


def find_sets(target: Target) -> frozenset[int]:
    """Return the broker ids of the replica sets; raises NoBrokerError as `at_set`."""

    def read(nodes: SetNodes) -> Awaitable[frozenset[int]]:
        until_s = nodes.clock.monotonic_s() + target.timeout_s
        return nodes.list_sets(deadline_s=until_s)

    return at_set(replace(target, brokers=()), 0, read)


def look(
    target: Target, broker_id: int | None
) -> tuple[SetView, Facts, dict[int, MetaqError]]:
    """Return the nodes of a set, facts of its replicas, and errors of the others."""

    async def work(nodes: SetNodes) -> tuple[SetView, Facts, dict[int, MetaqError]]:
        view = await nodes.read(synced=True)
        return view, *await ask_replicas(view, nodes.clock, timeout_s=target.timeout_s)

    return at_set(target, broker_id, work)


# -- looking --------------------------------------------------------------------------


@command(
    "replicas",
    id_option,
    examples=("metaq replicas", "metaq replicas --zookeeper zk1:2181 --id 0 --json"),
    cls=ListingGroup,
)
def show_replicas(target: Target, broker_id: int | None, *, as_json: bool) -> bool:
    """Show the replica set of a broker, or change it with a command.

    Prints the leader, the in-sync replicas and the lag of the others. The exit code is
    1 if no replica leads, or if puts are refused because too few in-sync replicas are
    present.
    """
    view, facts, errors = look(target, broker_id)
    record = view.view.record
    if record is None and not view.shown and broker_id is not None:
        others = _numbers(find_sets(target) - {broker_id}) or "none"
        raise ReplicaSetError(
            f"ZooKeeper has no replica set of broker {broker_id}; existing sets:"
            f" {others}; if it has lost one, start the replicas and run 'metaq"
            " replicas restore'"
        )
    if record is None:
        raise ReplicaSetError(
            "ZooKeeper has no record of this set: 'metaq replicas restore' restores it"
            f" from the copies of its replicas; present: {sorted(view.shown)}"
        )
    leader = view.view.leader
    leads = leader.replica if leader else None
    rows = _rows(record, view, facts, errors)
    there = record.in_sync & counted(view.view.presences)
    is_well = leads is not None and len(there) >= record.min
    if as_json:
        render.print_json(
            {
                "set": record.set_id,
                "leader": leads,
                "epoch": record.epoch.number,
                "revision": record.revision,
                "in_sync": sorted(record.in_sync),
                "min": record.min,
                "replicas": [dict(zip(COLUMNS, row, strict=True)) for row in rows],
            }
        )
        return is_well
    _print_rows(rows)
    named = ", ".join(f"replica {number}" for number in sorted(there))
    render.say(
        f"{f'replica {leads}' if leads else 'no replica'} leads in epoch"
        f" {record.epoch.number}; in sync and present: {named or 'none'};"
        f" {record.min} must have a put before it is acknowledged"
    )
    if not (leads or there):
        render.say(
            "start the in-sync replicas that are away; if those with all"
            " data are gone for good, 'metaq replicas elect' shows what would be lost"
        )
    return is_well


def _rows(
    record: SetRecord, view: SetView, facts: Facts, errors: Mapping[int, MetaqError]
) -> list[tuple[render.Cell, ...]]:
    """Return a row of `COLUMNS` for each replica."""
    lags = {lag.replica: lag for each in facts.values() for lag in each.lag}
    rows: list[tuple[render.Cell, ...]] = []
    for replica in sorted(record.replicas):
        shown, said = view.shown.get(replica), facts.get(replica)
        presence = shown.presence if shown else None
        lag = lags.get(replica)
        reason = said.reason if said else str(errors.get(replica, ""))
        rows.append(
            (
                replica,
                presence.state.value if presence else "away",
                said.role if said else None,
                replica in record.in_sync,
                (presence.flag.value or None) if presence else None,
                shown.address if shown else None,
                presence.epoch if presence else None,
                presence.revision if presence else None,
                presence.damaged if presence else None,
                said.mended if said else None,
                sum(log.end for log in said.logs) if said else None,
                lag.lag_bytes if lag else None,
                lag.lag_s if lag else None,
                reason or None,
            )
        )
    return rows


def _print_rows(rows: Sequence[Sequence[render.Cell]]) -> None:
    marks = [row[1] != "ready" for row in rows]
    render.print_rows(COLUMNS, rows, as_json=False, marks=marks)


# -- changing -------------------------------------------------------------------------


@command(
    "replicas add",
    replica_argument,
    id_option,
    min_option,
    examples=("metaq replicas add 3", "metaq replicas add 3 --min 2"),
)
def add(
    target: Target, replica: int, broker_id: int | None, min_in_sync: int | None
) -> None:
    """Add REPLICA to the set; it copies the logs and then becomes in sync.

    Start it afterwards, on an empty data directory.
    """
    _settle(target, broker_id, min_in_sync, lambda known: known | {replica})


@command(
    "replicas remove",
    replica_argument,
    id_option,
    min_option,
    examples=("metaq replicas remove 3",),
)
def remove(
    target: Target, replica: int, broker_id: int | None, min_in_sync: int | None
) -> None:
    """Remove REPLICA from the set for good; its data is not deleted.

    Refused for the leader, or if too few replicas would remain in sync.
    """
    _settle(target, broker_id, min_in_sync, lambda known: known - {replica})


def _settle(
    target: Target,
    broker_id: int | None,
    min_in_sync: int | None,
    replicas_of: Callable[[frozenset[int]], frozenset[int]],
) -> None:
    """Change the replicas of a set, and the number that must have a put."""

    def plan(view: SetView, record: SetRecord) -> Change | None:
        replicas, least = replicas_of(record.replicas), min_in_sync or record.min
        if (replicas, least) == (record.replicas, record.min):
            return None
        version = view.view.version
        return plan_settings(record, version, replicas=replicas, min_in_sync=least)

    record = at_set(target, broker_id, lambda nodes: change_set(nodes, plan))
    _say_replicas(record)


def _say_replicas(record: SetRecord) -> None:
    render.say(
        f"replicas {_numbers(record.replicas)}, of which {_numbers(record.in_sync)} are"
        f" in sync; {record.min} must have a put before it is acknowledged"
    )


def _numbers(replicas: Iterable[int]) -> str:
    return ", ".join(map(str, sorted(replicas)))


@command(
    "replicas transfer",
    replica_option(
        "--to", "replica", "Replica that becomes the leader.", required=True
    ),
    id_option,
    examples=("metaq replicas transfer --to 2",),
)
def transfer(
    target: Target, replica: int, broker_id: int | None, *, leads_s: float = LEADS_S
) -> bool:
    """Transfer leadership to another in-sync replica.

    Puts are delayed for a moment, and none fails. The exit code is 1 if the replica
    does not lead within 30 s; it will lead once it is in sync and ready. To withdraw
    the request, transfer to the present leader.
    """

    def plan(view: SetView, record: SetRecord) -> Change | None:
        if replica == (record.target or record.leader):
            return None
        if replica not in counted(view.view.presences):
            raise ReplicaSetError(
                f"replica {replica} cannot lead: it is away, or not ready"
            )
        return plan_transfer(record, view.view.version, replica)

    return _lead(target, broker_id, replica, plan, leads_s)


def _lead(
    target: Target, broker_id: int | None, replica: int, plan: Plan, leads_s: float
) -> bool:
    """Carry out a plan; return whether the replica leads within `leads_s`."""

    async def work(nodes: SetNodes) -> bool:
        await change_set(nodes, plan)
        return await wait_until_leads(nodes, replica, timeout_s=leads_s)

    is_leading = at_set(target, broker_id, work)
    late = f"does not lead after {leads_s:g} s, the request stays: see 'metaq replicas'"
    render.say(f"replica {replica} {'leads' if is_leading else late}")
    return is_leading


@command(
    "replicas elect",
    replica_option(
        "--force",
        "replica",
        "Replica to elect: the one that has the most data.",
        required=True,
    ),
    id_option,
    examples=("metaq replicas elect --force 2",),
)
def elect(
    target: Target,
    replica: int,
    broker_id: int | None,
    *,
    is_sure: bool,
    leads_s: float = LEADS_S,
) -> bool:
    """Elect a replica that lacks data, after those with all data are gone.

    Prints which logs of the other reachable replicas have more data, and asks for
    confirmation. Data that the elected replica lacks is lost for good: the others are
    truncated to its log ends. Committed offsets above these log ends are lowered to
    them; stop the members of the groups first.
    """
    view, facts, errors = look(target, broker_id)
    record = view.view.record
    if record is None:
        raise ReplicaSetError(
            "ZooKeeper has no record of this set: run 'metaq replicas restore' first"
        )
    if replica not in facts:
        reason = errors.get(replica, "it is away")
        raise ReplicaSetError(f"replica {replica} does not report its logs: {reason}")
    losses = find_losses(facts, replica)
    rows = [(*each[:4], _numbers(each.replicas)) for each in losses]
    render.print_rows(LOSS_COLUMNS, rows, as_json=False)
    unknown = record.replicas - facts.keys()
    render.say(
        f"{len(losses)} logs of {len(facts[replica].logs)} are shorter at replica"
        f" {replica} than elsewhere; replicas without an answer:"
        f" {_numbers(unknown) or 'none'}"
    )
    if replica not in record.in_sync and (silent := record.in_sync & unknown):
        render.say(
            f"replica {replica} is not in sync, and no answer came from"
            f" {_numbers(silent)}: puts acknowledged without it are lost, too"
        )
    ends = {log.name: log.end for log in facts[replica].logs}
    lower = partial(_lower_offsets, ends=ends)
    for each in at_set(target, broker_id, partial(lower, is_dry=True)):
        render.say(
            f"group {each.group}: committed offset {each.committed} of"
            f" {each.partition} will be set to {each.end}"
        )
    question = f"Elect replica {replica}, and lose the data that it lacks?"
    render.may_change(question, is_dry=False, is_sure=is_sure)
    nonce = uuid.uuid4().hex

    def plan(view: SetView, record: SetRecord) -> Change | None:
        if _has_claim(record, nonce):
            return None
        return plan_force(record, view.view.version, replica, nonce)

    async def force(nodes: SetNodes) -> str:
        await change_set(nodes, plan)
        # After this, only members that still run can commit above these ends.
        lowered = await lower(nodes)
        return render.count_text(len(lowered), "committed offset")

    count = at_set(target, broker_id, force)
    render.say(f"{count} lowered to the log ends of replica {replica}")
    return _lead(target, broker_id, replica, lambda *_: None, leads_s)


async def _lower_offsets(
    nodes: SetNodes, *, ends: Mapping[str, int], is_dry: bool = False
) -> list[OffsetAbove]:
    """Lower committed offsets above these log ends, unless dry; return them."""
    deadline_s = nodes.clock.monotonic_s() + OFFSETS_S
    above = await find_offsets_above(nodes, ends, deadline_s=deadline_s)
    if not is_dry:
        await lower_offsets(nodes, above, deadline_s=deadline_s)
    return above


def _has_claim(record: SetRecord, nonce: str) -> bool:
    """Return whether the epoch of this nonce was created, even if others followed."""
    return any(claim.epoch.nonce == nonce for claim in record.claims)


@command(
    "replicas restore",
    replica_option(
        "--missing",
        "missing",
        "Replica to continue without; may be repeated.",
        multiple=True,
    ),
    id_option,
    examples=("metaq replicas restore --dry-run", "metaq replicas restore --missing 3"),
)
def restore(
    target: Target,
    broker_id: int | None,
    missing: tuple[int, ...],
    *,
    is_dry: bool,
    is_sure: bool,
) -> None:
    """Restore the record of a set that ZooKeeper has lost or reverted.

    The replicas freeze in that case and keep copies of the record; the newest copy is
    written. Start all replicas first. If the record is intact, nothing is written.
    """
    nonce = uuid.uuid4().hex
    seen, facts, errors = look(target, broker_id)
    copies = {k: one.record for k, one in facts.items() if one.record is not None}
    found = seen.view.record
    if found is not None and follows_from_all(found, copies, seen.view.presences):
        render.say("nothing to restore: the record follows from each copy")
        return
    completed = {
        k: one.completed for k, one in facts.items() if not seen.shown[k].presence.flag
    }
    record = restored_record(
        copies, found, completed=completed, missing=frozenset(missing), nonce=nonce
    )
    _print_rows(_rows(record, seen, facts, errors))
    question = (
        f"Restore the set with replicas {_numbers(record.replicas)}, of which"
        f" {_numbers(record.in_sync)} are in sync?"
    )
    if not render.may_change(question, is_dry=is_dry, is_sure=is_sure):
        return

    def plan(view: SetView, found: SetRecord) -> Change | None:
        if _has_claim(found, nonce):
            return None
        if found != seen.view.record:
            raise ReplicaSetError(
                "the record of the set has changed: run the command again"
            )
        version = view.view.version
        return Change(Purpose.OPERATOR, record, version, LeaderNode.DELETED)

    at_set(target, broker_id, lambda nodes: change_set(nodes, plan, first=record))
    _say_replicas(record)


# -- data directories on this machine -------------------------------------------------


@command(
    "replicas init",
    config_option,
    settings_option,
    replica_option(
        "--replica",
        "others",
        "Another replica of the set; may be repeated.",
        multiple=True,
    ),
    replica_option(
        "--min", "min_in_sync", MIN_TEXT, default=MIN_IN_SYNC, show_default=True
    ),
    examples=("metaq replicas init --config server.ini --replica 2 --replica 3",),
)
def init(
    path: Path,
    settings: dict[str, str],
    others: tuple[int, ...],
    min_in_sync: int,
    *,
    is_sure: bool,
    new_coordinator: Callable[[Clock], Coordinator] | None = None,
) -> None:
    """Create a replica set from the one data directory that has the data.

    Run it once, where the broker has been running, or where the first replica will run.
    The other replicas start empty and copy the data. No broker may be running on the
    directory.
    """
    config = load_config(str(path), read_bytes, settings)
    replica, target = _replica_of(config, new_coordinator)
    set_id, nonce = uuid.uuid4().hex, uuid.uuid4().hex
    everyone = {replica, *others}
    drawn = make_record(set_id, replica, everyone, min_in_sync=min_in_sync, nonce=nonce)
    fs = SystemFileSystem()
    with locked(data_paths(config)) as paths:
        count = sum(len(find_logs(fs, each)) for each in paths)
        render.say(
            f"broker {config.system.broker_id} becomes a set of replicas"
            f" {_numbers(drawn.replicas)}; replica {replica} has its data:"
            f" {render.count_text(count, 'partition')} in {paths[0]}"
        )
        question = "Is this the only data directory that has the data?"
        render.may_change(question, is_dry=False, is_sure=is_sure)

        work = partial(make_set, paths=paths, drawn=drawn, replica=replica)
        record = at_set(target, config.system.broker_id, work)
    _say_replicas(record)


async def make_set(
    nodes: SetNodes, paths: Sequence[Path], drawn: SetRecord, replica: int
) -> SetRecord:
    """Create a set from the data directories of one replica, which must be locked.

    Raises:
        ReplicaSetError: there is another set, or this one has begun already; or the
            directories have unfinished work that a set cannot complete.
        CoordinationError: ZooKeeper does not answer.
    """
    fs = SystemFileSystem()
    if why := find_unfinished(fs, paths):
        raise ReplicaSetError(why)
    found = (await nodes.read(synced=True)).view.record
    record, member = begin_set(
        fs,
        paths,
        drawn,
        replica,
        nodes.clock.wall_ms(),
        found=found,
        draw=secrets.token_bytes,
    )

    def check(_view: SetView, found: SetRecord) -> None:
        if found.set_id != record.set_id:
            raise ReplicaSetError(f"another set was created: {found.set_id}")

    return await change_set(nodes, check, first=record, members={replica: member})


@command(
    "replicas join",
    config_option,
    settings_option,
    flag(
        "--discard",
        "is_discarding",
        help="Move the partitions of the data directory aside.",
    ),
    examples=("metaq replicas join --config server.ini --discard",),
)
def join(
    path: Path,
    settings: dict[str, str],
    *,
    is_discarding: bool,
    is_sure: bool,
    new_coordinator: Callable[[Clock], Coordinator] | None = None,
) -> bool:
    """Check that a replica can join its set when it is started.

    A data directory that has partitions but is unknown to the set cannot join:
    --discard moves the partitions to `aside` in that directory, and the replica then
    copies all data from the leader. No broker may be running on the directory.
    """
    config = load_config(str(path), read_bytes, settings)
    replica, target = _replica_of(config, new_coordinator)

    broker_id = config.system.broker_id
    view = at_set(target, broker_id, lambda nodes: nodes.read(synced=True))
    record = check_newcomer(view.view.record, broker_id, replica, log_count=0)
    others = (record.in_sync & counted(view.view.presences)) - {replica}
    fs = SystemFileSystem()
    with locked(data_paths(config)) as paths:
        count = sum(len(find_logs(fs, each)) for each in paths)
        if count and not is_discarding:
            render.say(
                f"{paths[0]} has {render.count_text(count, 'partition')}: use --discard"
                " to move them aside if they are not needed"
            )
            return False
        if is_discarding:
            if not others:
                raise ReplicaSetError(
                    f"no other in-sync replica is present, so {paths[0]} may have the"
                    " only copy of some data: start one of them first"
                )
            question = f"Move {render.count_text(count, 'partition')} aside?"
            render.may_change(question, is_dry=False, is_sure=is_sure)
            leave_set(fs, paths, SystemClock().wall_ms())
    render.say(f"replica {replica} joins when it is started")
    return True


def _replica_of(
    config: BrokerConfig, new_coordinator: Callable[[Clock], Coordinator] | None
) -> tuple[int, Target]:
    """Return the number of the replica in some settings, and the cluster of its set."""
    if config.replication is None:
        raise ConfigError(f"{config.path}: expected a section [replication]")
    zookeeper = config.zookeeper
    timeout_s = zookeeper.connection_timeout_ms / 1000
    target = Target(zookeeper.connect, zookeeper.root, (), timeout_s, new_coordinator)
    return config.replication.replica_id, target


@contextlib.contextmanager
def locked(paths: Sequence[Path]) -> Iterator[Sequence[Path]]:
    """Lock data directories, created if missing, against brokers during the block."""
    fs = SystemFileSystem()
    with contextlib.ExitStack() as held:
        for path in paths:
            path.mkdir(parents=True, exist_ok=True)
            held.callback(fs.lock_directory(path).release)
        yield paths
