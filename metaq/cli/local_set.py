"""The replicas of `metaq local --replicas N`: processes on this machine.

This process creates the set if there is none, starts the replicas, restarts those that
have ended, and prints a line for each that is ready. It reads their state in ZooKeeper,
as any client does. The replicas end with this process, however it ends.
"""

import asyncio
import signal
import sys
import uuid
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import click

from metaq.cli import render
from metaq.cli.cluster import open_session
from metaq.cli.options import read_bytes
from metaq.cli.replicas import MIN_IN_SYNC, locked, make_set
from metaq.clock import Clock, SystemClock
from metaq.config.load import load_config
from metaq.config.settings import BrokerConfig
from metaq.errors import ConfigError, CoordinationError
from metaq.replication.election import PresenceState
from metaq.replication.record import NO_REPLICA, make_record
from metaq.replication.set_nodes import SetNodes, SetView
from metaq.retry import wait_set
from metaq.storage.opening import data_paths
from metaq.zk.embedded import dying_with_parent
from metaq.zk.paths import NodePaths, normalize_root
from metaq.zk.session import Coordinator

FIRST: Final = 1
"""Replica that has the data when the set is created."""
RESTART_S: Final = 3.0
"""Pause before a replica that has ended is restarted."""
STOP_S: Final = 15.0
"""Time for a replica to end after a signal."""
READ_S: Final = 1.0
"""Interval at which ZooKeeper is read even without a notification."""
CONNECT_S: Final = 30.0


@dataclass(slots=True, eq=False)
class LocalReplica:
    """A replica: its settings and its process. Owned by `LocalSet`."""

    number: int
    settings: Path
    overrides: Mapping[str, str]
    """Overrides of the settings: port, data directory, number, and the user's own."""
    process: asyncio.subprocess.Process | None = None
    shown: str = ""
    """Token of the replica's run whose line was printed last."""

    @property
    def config(self) -> BrokerConfig:
        """Settings with the overrides."""
        return load_config(str(self.settings), read_bytes, self.overrides)


class LocalSet:
    """Runs a set on this machine. Owned by the command, on the main thread's loop."""

    def __init__(self, replicas: Sequence[LocalReplica]) -> None:
        """Configure the set; nothing runs yet."""
        self._replicas = {each.number: each for each in replicas}
        self._config = replicas[0].config
        self._changed = asyncio.Event()
        self._is_ready = False

    async def run(self) -> None:
        """Run until SIGTERM or SIGINT.

        Raises:
            ConfigError: the existing set has other replicas.
            CoordinationError: ZooKeeper does not answer, or has another set.
        """
        clock, zookeeper = SystemClock(), self._config.zookeeper
        is_over = asyncio.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, is_over.set)
        tasks: list[asyncio.Task[None]] = []
        async with open_session(zookeeper.connect, clock) as coordinator:
            try:
                nodes = await self._make(coordinator, clock)
                works = [
                    self._announce(nodes),
                    *map(self._keep, self._replicas.values()),
                ]
                tasks += [asyncio.create_task(work, name="local set") for work in works]
                over = asyncio.create_task(is_over.wait(), name="local set over")
                await asyncio.wait((*tasks, over), return_when=asyncio.FIRST_COMPLETED)
                over.cancel()
                for task in tasks:
                    if task.done():
                        task.result()
            finally:
                for task in tasks:
                    task.cancel()
                await self._stop()

    async def _make(self, coordinator: Coordinator, clock: Clock) -> SetNodes:
        """Return the nodes of the set; create the set if there is none."""
        paths = NodePaths(normalize_root(self._config.zookeeper.root))
        broker_id = self._config.system.broker_id
        nodes = SetNodes(coordinator, paths, broker_id, NO_REPLICA, clock=clock)
        view = await nodes.read_first(CONNECT_S)
        wanted = frozenset(self._replicas)
        record = view.view.record
        if record is None:
            nonces = uuid.uuid4().hex, uuid.uuid4().hex
            drawn = make_record(
                nonces[0], FIRST, wanted, min_in_sync=MIN_IN_SYNC, nonce=nonces[1]
            )
            with locked(data_paths(self._config)) as directories:
                record = await make_set(nodes, directories, drawn, FIRST)
        if record.replicas != wanted:
            raise ConfigError(
                f"the set here has replicas {sorted(record.replicas)}: expected"
                f" --replicas {len(record.replicas)}, got {len(wanted)}"
            )
        return nodes

    async def _keep(self, replica: LocalReplica) -> None:
        """Run a replica; restart it whenever it ends."""
        pairs = [f"{key}={value}" for key, value in replica.overrides.items()]
        command = [
            *dying_with_parent(),
            *(sys.executable, "-m", "metaq", "broker", "--config"),
            str(replica.settings),
            *(word for pair in pairs for word in ("--set", pair)),
        ]
        while True:
            replica.process = await asyncio.create_subprocess_exec(
                *command,
                stdin=asyncio.subprocess.DEVNULL,
                # Ctrl-C on the terminal goes to this process only, which ends them.
                start_new_session=True,
            )
            code = await replica.process.wait()
            render.say(
                f"replica {replica.number} ended with exit code {code}; restarting it"
                f" in {RESTART_S:g} s"
            )
            await asyncio.sleep(RESTART_S)

    async def _stop(self) -> None:
        """End all replicas at once."""
        running = [
            each.process
            for each in self._replicas.values()
            if each.process is not None and each.process.returncode is None
        ]
        for number in (signal.SIGTERM, signal.SIGKILL):
            for process in running:
                with suppress(ProcessLookupError):
                    process.send_signal(number)
            with suppress(TimeoutError):
                async with asyncio.timeout(STOP_S):
                    for process in running:
                        await process.wait()
                    return

    async def _announce(self, nodes: SetNodes) -> None:
        """Print that the set is ready, then each replica that is ready."""
        cancel = nodes.watch(self._changed.set)
        try:
            while True:
                self._changed.clear()
                with suppress(CoordinationError):
                    self._print(await nodes.read(synced=False))
                await wait_set(self._changed, READ_S)
        finally:
            cancel()

    def _print(self, view: SetView) -> None:
        record, leader = view.view.record, view.view.leader
        if record is None or leader is None:
            return
        if not self._is_ready:
            if len(record.in_sync) < record.min:
                return
            self._is_ready = True
            click.echo(
                f"ready broker={view.leader_address}"
                f" zookeeper={self._config.zookeeper.connect}"
                f" data={self._config.system.data_path}"
            )
        for number, shown in sorted(view.shown.items()):
            replica = self._replicas.get(number)
            is_there = shown.presence.state is PresenceState.READY
            if replica is None or replica.process is None or not is_there:
                continue
            if replica.shown != shown.token:
                replica.shown = shown.token
                role = "leader" if number == leader.replica else "follower"
                click.echo(
                    f"replica id={number} pid={replica.process.pid} role={role}"
                    f" address={shown.address} data={replica.config.system.data_path}"
                )
        sys.stdout.flush()
