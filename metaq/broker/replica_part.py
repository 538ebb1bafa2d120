"""The part of a broker that makes it a replica of a set.

The rules are in `metaq.replication`; this module applies them to a broker. It takes
puts while its replica leads and enough others follow. Only the leader is registered in
MetaQ's nodes in ZooKeeper; a follower is known to its set alone, and answers gets up to
the high watermark that it knows.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Final

from metaq.broker.context import BrokerContext
from metaq.config.settings import BrokerConfig, TopicConfig
from metaq.errors import MetaqError, NotLeaderError, UnavailableError, WireError
from metaq.fs import FileSystem
from metaq.lifecycle import Service
from metaq.model import MessageId
from metaq.protocol.commands import Follow
from metaq.record.ids import id_after
from metaq.replication.election import Flag
from metaq.replication.facts import encode_facts
from metaq.replication.node import ReplicaNode
from metaq.replication.set_file import read_set_file, write_set_file
from metaq.replication.set_nodes import SetNodes
from metaq.replication.store import StartFacts
from metaq.replication.tables import EpochTables
from metaq.retry import wait_set
from metaq.storage.log_manager import LogManager
from metaq.zk.paths import NodePaths, normalize_root
from metaq.zk.plan import BrokerSnapshot
from metaq.zk.registry import BrokerRegistry, RegistrationState, RegistrationStatistics
from metaq.zk.session import Coordinator, SessionState

_log = logging.getLogger(__name__)

WITHDRAW_S: Final = 3.0
"""Maximum wait for the withdrawal at the end of a term, in seconds."""
HUNG_S: Final = 1.0
"""Time without running after which a process may have lost its session and its term."""
LOOK_S: Final = 0.25
"""Delay between reads of the present leader, in seconds."""


def open_set(
    fs: FileSystem, config: BrokerConfig, logs: LogManager, paths: Sequence[Path]
) -> StartFacts:
    """Open the logs of a replica with what the set knows of them; blocks.

    Includes logs of topics in deletion: the leader has them until their numbers are
    deleted, and would take them for lost here.

    Raises:
        StorageError: as `LogManager.open`.
    """
    path = Path(config.system.data_path)
    file, is_cut = read_set_file(fs, path), False
    tables = EpochTables(fs, paths)

    def note_cut() -> None:
        """Write the flag before a tail is cut, which may have acknowledged bytes."""
        nonlocal file, is_cut
        is_cut = True
        if file is not None and not file.flag:
            file = replace(file, flag=Flag.CUT)
            write_set_file(fs, path, file)

    logs.open(
        numbers=tables.numbers,
        starts=tables.starts,
        buried=tables.buried,
        on_torn_tail=note_cut,
    )
    tables.attach(logs)
    lacks_bytes = logs.lacks_bytes or tables.is_damaged
    return StartFacts(tables, file, is_cut, lacks_bytes, logs.were_sealed)


class ReplicaPart(Service):
    """The replica of a broker. Owned by the broker; used on the loop's thread."""

    def __init__(
        self,
        context: BrokerContext,
        coordinator: Coordinator,
        *,
        fs: FileSystem,
        logs: LogManager,
        facts: StartFacts,
        snapshot: Callable[[], BrokerSnapshot],
    ) -> None:
        """Create the part; nothing is read before `start`.

        Args:
            context: context of the broker; its settings have a section `[replication]`.
            coordinator: ZooKeeper session of the broker; owned from now on.
            fs: the disk.
            logs: logs opened by `open_set`.
            facts: result of `open_set`.
            snapshot: returns the snapshot to register for clients.
        """
        super().__init__("set", stop_timeout_s=8.0)
        config, clock = context.config, context.clock
        assert config.replication is not None, "a member of a set"
        self._context = context
        self._coordinator = coordinator
        self._clock = clock
        self._logs = logs
        self._snapshot = snapshot
        self._tables = facts.tables
        self._paths = NodePaths(normalize_root(config.zookeeper.root))
        self._registry: BrokerRegistry | None = None
        self._ran_s = clock.boot_s()
        self._thawed_s: float | None = None
        self._thawed = asyncio.Event()
        self._wake = asyncio.Event()
        replica_id = config.replication.replica_id
        broker_id = config.system.broker_id
        self._title = self._paths.set_leader(broker_id)
        self.node = ReplicaNode(
            config,
            SetNodes(coordinator, self._paths, broker_id, replica_id, clock=clock),
            fs=fs,
            logs=logs,
            facts=facts,
            host=self,
        )
        """The replica of this broker."""

    @property
    def address(self) -> str:
        """Return the advertised address."""
        return self._context.address

    @property
    def is_leading(self) -> bool:
        """Return whether it leads; then it takes puts if enough replicas follow."""
        return self.node.epoch > 0

    @property
    def knows_ends(self) -> bool:
        """Return whether it is certainly the leader: its log ends are the set's.

        False after the process hung (which this call may notice before any timer does)
        until it has read who leads, because its log ends may be old. False also after
        the session is lost, unless it hears from all replicas that could lead instead.
        """
        now_s = self._clock.boot_s()
        if now_s - self._ran_s > HUNG_S:
            self._thawed_s = now_s
        self._ran_s = now_s
        is_over = self._coordinator.status.state is SessionState.LOST
        streams = self.node.streams
        is_alone = is_over and (streams is None or not streams.hears_all())
        return self.is_leading and self._thawed_s is None and not is_alone

    @property
    def is_registered(self) -> bool:
        """Return whether clients can find it: it leads and is registered."""
        return self.statistics().state is RegistrationState.REGISTERED

    @property
    def epoch(self) -> int:
        """Return the leader epoch of its term; 0 while it does not lead."""
        return self.node.epoch

    async def on_start(self) -> None:
        """Connect in the background, and start the replica.

        Raises:
            ReplicaSetError: as `ReplicaNode.on_start`.
        """

        async def end_session() -> None:
            await self._coordinator.stop(deadline_s=self._clock.monotonic_s() + 3.0)

        self.on_way_down("session", end_session)
        self._coordinator.start()
        self.on_way_down("registry", self._withdraw)
        self.spawn(self._run(), name="registry")
        self.spawn(self._look(), name="look")
        await self.start_owned(self.node)

    def handle(
        self,
        command: Follow,
        owner: object,
        answer: Callable[[bytes | WireError], None],
    ) -> None:
        """Answer a `follow` exactly once, now or later."""
        self.node.answers.handle(command, owner, answer)

    def drop(self, owner: object) -> None:
        """Drop the unanswered requests of a connection that ends."""
        self.node.drop(owner)

    async def bury(self, topic: str) -> None:
        """Record durably, for the whole set, that the logs of a topic are deleted."""
        await self._tables.bury_topic(topic)

    def update(self) -> None:
        """Update the registration, after topics or their settings have changed."""
        if self._registry is not None:
            self._registry.update(self._entitled())

    def statistics(self) -> RegistrationStatistics:
        """Return a snapshot of the registration; IDLE on a follower."""
        if self._registry is not None:
            return self._registry.statistics()
        return RegistrationStatistics(
            state=RegistrationState.IDLE, session=self._coordinator.status
        )

    def facts(self) -> str:
        """Return the line of `stats replica`."""
        return encode_facts(self.node.facts())

    # -- of the replica (ReplicaHost) -------------------------------------------------

    def settings_of(self, topic: str) -> TopicConfig:
        """Return the settings of a topic."""
        return self._context.config.topic(topic)

    def refuse_puts(self, error: UnavailableError | None) -> None:
        """Refuse puts with this error before they are appended; None: take puts."""
        self._context.topics.refuse(error)
        if self._context.queues is not None:
            is_leading = not isinstance(error, NotLeaderError)
            self._context.queues.set_leading(is_leading=is_leading)

    def begin_term(self, last_id: MessageId) -> None:
        """Assign ids above this one, and register for clients."""
        self._context.ids.advance_to(id_after(last_id, 1))
        self._wake.set()

    def end_term(self) -> None:
        """Withdraw the registration."""
        self._wake.set()

    def on_check(self) -> None:
        """Check whether the process hung; called at least twice a second."""
        if not self.knows_ends and self._thawed_s is not None:
            self._thawed.set()

    async def _look(self) -> None:
        """Read who leads after this process hung, until it is known."""
        while True:
            await self._thawed.wait()
            self._thawed.clear()
            thawed_s = self._thawed_s
            with suppress(MetaqError):
                async with self.node.lock:
                    leader = (await self.node.read()).leader
                is_sure = not self.is_leading or (leader and leader.is_own)
                if is_sure and self._thawed_s == thawed_s:
                    self._thawed_s = None
            await asyncio.sleep(LOOK_S)

    # -- MetaQ's nodes ----------------------------------------------------------------

    async def _run(self) -> None:
        """Register when a term begins, and withdraw when it ends."""
        while True:
            self._wake.clear()
            if self.is_leading and self._registry is None:
                self._registry = BrokerRegistry(
                    self._coordinator, self._paths, clock=self._clock
                )
                self._registry.start()
                self._registry.update(self._entitled())
            elif not self.is_leading:
                await self._withdraw()
            await wait_set(self._wake, None)

    async def _withdraw(self) -> None:
        registry, self._registry = self._registry, None
        if registry is not None:
            await registry.withdraw(deadline_s=self._clock.monotonic_s() + WITHDRAW_S)

    def _entitled(self) -> BrokerSnapshot:
        return replace(self._snapshot(), title=self._title)
