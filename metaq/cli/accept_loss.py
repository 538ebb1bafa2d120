"""`metaq accept-loss`: let the next start accept the losses of a data directory.

It shows why that start would be refused, or would stop partitions, by the functions of
the start itself. It writes one file, the record of the directory's contents, and only
if no broker runs there. To ask the other witnesses (the broker's other data
directories, ZooKeeper) it needs the settings of the broker; a refused start has stored
their claims in the record.
"""

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import click

from metaq.cli import render
from metaq.cli.cluster import open_session
from metaq.cli.inspect_log import list_segments, require_data_directory
from metaq.cli.options import FILE, directory_argument, read_bytes
from metaq.cli.tree import command
from metaq.clock import Clock, SystemClock
from metaq.config.load import load_config
from metaq.config.settings import BrokerConfig
from metaq.errors import ConfigError, CoordinationError
from metaq.fs import FileSystem, SystemFileSystem
from metaq.model import Millis
from metaq.storage.holdings import Claim, Holdings, find_fault
from metaq.storage.inventory import (
    TRANSACTIONS,
    claims_of_siblings,
    claims_of_zookeeper,
    losses_by_record,
    read_holdings,
    write_holdings,
)
from metaq.storage.log_writer import UNSYNCED_BYTES_MAX
from metaq.storage.opening import data_paths, partition_names
from metaq.storage.recovery import find_extent
from metaq.zk.paths import NodePaths, normalize_root
from metaq.zk.session import Coordinator


@command(
    "accept-loss",
    directory_argument,
    click.option(
        "--config",
        type=FILE,
        callback=lambda _context, _option, path: (
            None if path is None else load_config(str(path), read_bytes)
        ),
        help="Configuration file of the broker: also show what its other data"
        " directories and ZooKeeper record about DIRECTORY; required to accept a new"
        " disk.",
    ),
    examples=(
        "metaq accept-loss /var/lib/metaq",
        "metaq accept-loss /var/lib/metaq --config config/server.ini",
    ),
)
def accept_loss(
    directory: Path,
    config: BrokerConfig | None,
    *,
    is_sure: bool,
    new_coordinator: Callable[[Clock], Coordinator] | None = None,
) -> None:
    """Accept missing data for good, so that the broker can start.

    For a broker that refuses to start, or has stopped a partition, because the data
    directory DIRECTORY contains less than before. If a disk is not mounted, mount it
    instead. Prints what is missing and asks for confirmation; the next start accepts
    the present contents as complete. The broker must not be running.
    """
    fs = SystemFileSystem()
    path = directory if config is None else _configured(directory, config)
    names = [
        name
        for name in partition_names(fs, directory)
        if fs.is_directory(directory / name)
    ]
    if config is None and not list_segments(fs, (directory / name for name in names)):
        # A broker started without its disk leaves a lock file in the mount point.
        advice = "; to accept a new disk, name the broker's configuration with"
        " --config"
        require_data_directory(fs, directory, advice)
    lock = fs.lock_directory(directory)
    try:
        record = read_holdings(fs, directory)
        claims = dict(record.refused_by) if record is not None else {}
        journal = directory / TRANSACTIONS
        if config is not None:
            journal = Path(config.system.data_log_path) / TRANSACTIONS
            records = {each: read_holdings(fs, each) for each in data_paths(config)}
            claims |= claims_of_siblings(path, records)
            if config.zookeeper.is_enabled:
                known = _ask_zookeeper(config, new_coordinator)
                claims |= claims_of_zookeeper(path, names, *known)
        _show(fs, directory, record, names, claims, journal)
        if config is None:
            click.echo(
                "use --config to also show what the broker's other data directories"
                " and ZooKeeper record about it"
            )
        question = "Accept the present contents as complete at the next start?"
        if not is_sure:
            click.confirm(question, abort=True)
        record = record or Holdings(identity="", written_ms=Millis(0))
        write_holdings(fs, directory, replace(record, is_accepted=True, refused_by={}))
    finally:
        lock.release()
    click.echo("accepted for the next start only: start the broker")


def _show(
    fs: FileSystem,
    directory: Path,
    record: Holdings | None,
    names: list[str],
    claims: Mapping[str, Claim],
    journal: Path,
) -> None:
    """Print why a start would be refused, or would stop partitions."""
    if record is not None and not record.identity:
        record = None
    fault = find_fault(directory, record, names, claims)
    if record is not None and (record.partitions or not fault):
        now_ms = SystemClock().wall_ms()
        found = {
            name: find_extent(
                fs,
                directory / name,
                unsynced_bytes_max=UNSYNCED_BYTES_MAX,
                now_ms=now_ms,
            )
            for name in names
        }
        losses = losses_by_record(fs, directory, record, found, journal)
        for name, loss in losses.items():
            click.echo(f"{name}: {loss.detail}")
        click.echo(
            f"{directory}: expected {len(record.partitions)} partitions,"
            f" {len(losses)} of them have less than recorded"
        )
    if fault:
        click.echo(fault)
    elif record is None:
        click.echo(f"{directory}: {len(names)} partitions, no record of others")


def _configured(directory: Path, config: BrokerConfig) -> Path:
    """Return a data directory as spelt in the settings, which witnesses use too."""
    for path in data_paths(config):
        if path.resolve() == directory.resolve():
            return path
    expected = " or ".join(map(str, data_paths(config)))
    raise ConfigError(f"{config.path}: expected dataPath {expected}, got {directory}")


def _ask_zookeeper(
    config: BrokerConfig, new_coordinator: Callable[[Clock], Coordinator] | None
) -> tuple[str, Mapping[str, tuple[str, int]]]:
    """Return ZooKeeper's name in messages, and its claims about the data directories.

    If ZooKeeper does not answer, print that, and return no claims, as a start does.
    """
    from metaq.broker.registration import read_claims, witness_of  # noqa: PLC0415  # as in serve.py

    zookeeper = config.zookeeper
    paths = NodePaths(normalize_root(zookeeper.root))
    node = paths.recorded_directories(config.system.broker_id)

    async def ask() -> Mapping[str, tuple[str, int]]:
        clock = SystemClock()
        session = open_session(zookeeper.connect, clock, new_coordinator)
        async with session as coordinator:
            until_s = clock.monotonic_s() + zookeeper.connection_timeout_ms / 1000
            return await read_claims(coordinator, node, clock, deadline_s=until_s)

    try:
        return witness_of(node), asyncio.run(ask())
    except CoordinationError as error:
        render.say(
            f"ZooKeeper at {zookeeper.connect} does not answer, its records are not"
            f" shown: {error}"
        )
        return witness_of(node), {}
