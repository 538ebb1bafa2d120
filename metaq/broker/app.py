"""Assembles a running broker from its settings. The only module that knows all parts.

Start order: recover the data directories, choose ids above all stored ones, open the
port, the admin socket, housekeeping and HTTP, and register last, because clients
connect as soon as they see the registration. If the start fails, the parts that have
started are stopped in reverse order, and the error is one sentence.

Stop order: withdraw from ZooKeeper and give clients time to notice, close the port,
answer every waiting get, store and answer requests in flight, close the connections,
sync and close the logs. All of this is bounded by shutdownTimeoutMs; unfinished work is
dropped then, and the process still ends.

`Broker` is a library: tests start it on port 0. `process.py` is the process around it.

Source: docs/metaq-1.4/broker.md 10.1, 10.2; section 12 rows 11, 18 and 19.
"""

import asyncio
import contextlib
import logging
import secrets
import socket
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

from metaq.broker.admin import AdminServer
from metaq.broker.context import BrokerContext
from metaq.broker.control import Control
from metaq.broker.definitions import Definitions
from metaq.broker.delay_service import DelayService
from metaq.broker.housekeeping import Finish, Housekeeping, Work
from metaq.broker.jobs import BrokerJobs
from metaq.broker.load import Load, PacedWork, Turns, call_after_sockets
from metaq.broker.orders import perform
from metaq.broker.queue_service import QueueService
from metaq.broker.realtime import Realtime
from metaq.broker.registration import (
    Registration,
    advertised_host,
    find_unknown_hosts,
    host_problem,
    listening_host,
    make_snapshot,
)
from metaq.broker.schedule import Schedules, local_timezone, parse_schedule
from metaq.broker.session import Session
from metaq.broker.single_puts import SinglePuts
from metaq.broker.topics import Topics
from metaq.broker.transactions import ServedLogs
from metaq.broker.waiters import Waiters
from metaq.clock import Clock, SystemClock
from metaq.config.settings import BrokerConfig
from metaq.errors import (
    ConfigError,
    LogDirLockedError,
    MetaqError,
    NoSpaceError,
    NotLeaderError,
    StorageError,
    TransactionError,
)
from metaq.fs import FileSystem, SystemFileSystem
from metaq.fs.group_thread import post_to
from metaq.fs.helper_threads import HelperThreads, start_call
from metaq.fs.kernel_syncs import KernelSyncs
from metaq.lifecycle import Service
from metaq.model import BrokerAddress, LogId
from metaq.net.channel import Channel
from metaq.net.listener import Listener
from metaq.net.poller import Poller
from metaq.record.ids import IdGenerator
from metaq.replication.record import SET_FILE
from metaq.retry import wait_set
from metaq.storage.inventory import TRANSACTIONS
from metaq.storage.key_builder import KeyBuilder
from metaq.storage.log_manager import LogManager
from metaq.storage.opening import data_paths
from metaq.storage.scrub import Scrub
from metaq.txn.coordinator import TransactionCoordinator
from metaq.txn.figures import TransactionLimits
from metaq.txn.journal import Journal
from metaq.txn.opening import JournalOpening, OpenedJournal
from metaq.zk.coordinator import ZooKeeperCoordinator
from metaq.zk.plan import BrokerSnapshot
from metaq.zk.session import Coordinator

if TYPE_CHECKING:
    from metaq.broker.replica_part import ReplicaPart

_log = logging.getLogger(__name__)

UPKEEP_THREADS: Final = 2
"""Threads for retention, scrub and look-ups: while an archive keeps one busy for
minutes, the other serves the rest."""

NO_TRANSACTIONS: Final = "a replica set takes no transactions yet: send without one"

PART_STOP_S_MAX: Final = 2.0
"""Maximum duration of the stop of administration and of housekeeping, in seconds."""

WITHDRAW_SHARE: Final = 0.4
"""Share of the shutdown time for withdrawing and for clients to notice. The drain has
the same share, and the logs have the rest."""


class Broker(Service):
    """One broker. Owned by its starter; runs on one event loop."""

    def __init__(
        self,
        config: BrokerConfig,
        *,
        overrides: Mapping[str, str] | None = None,
        clock: Clock | None = None,
        fs: FileSystem | None = None,
        coordinator: Coordinator | None = None,
        choose: Callable[[int], int] = secrets.randbelow,
        on_failure: Callable[[Service, BaseException], None] | None = None,
    ) -> None:
        """Describe a broker; nothing is opened before `start`.

        Args:
            config: its settings.
            overrides: overrides of the settings, for reloads.
            clock: time; the machine's by default.
            fs: the disk; the machine's by default.
            coordinator: the ZooKeeper session; by default one to zk.zkConnect. Not
                used when zk.zkEnable is false.
            choose: returns a random number in 0..n-1, for puts to any partition.
            on_failure: called when a running part fails; the owner stops the broker.
        """
        self._shutdown_s = config.limits.shutdown_timeout_ms / 1000
        super().__init__(
            "broker", stop_timeout_s=self._shutdown_s, on_failure=on_failure
        )
        self._config = config
        self._overrides = dict(overrides or {})
        self._clock = clock or SystemClock()
        self._fs = fs or SystemFileSystem()
        self._coordinator = coordinator
        self._choose = choose
        self._sessions: dict[Session, str] = {}
        self._is_drained = asyncio.Event()
        self._registration: Registration | None = None
        self._replica: ReplicaPart | None = None
        self._queues: QueueService | None = None
        self._delays: DelayService | None = None
        self._opening: JournalOpening | None = None
        self.http_port: int | None = None
        """Port of /health and /metrics; None without one."""
        self.context: BrokerContext
        """Parts used by handlers; set by `start`."""
        self.control: Control
        """Administration; set by `start`."""

    @property
    def address(self) -> str:
        """Return the advertised address, `meta://host:port`; valid after `start`."""
        return self.context.address

    @property
    def port(self) -> int:
        """Return the port that is listened on; valid after `start`."""
        return self.context.port

    @property
    def sessions(self) -> tuple[Session, ...]:
        """Return the open connections, oldest first."""
        return tuple(self._sessions)

    # -- start ------------------------------------------------------------------------

    async def on_start(self) -> None:
        """Bring everything up in order.

        Raises:
            MetaqError: a part cannot start; the text is one sentence.
        """
        self._loop = asyncio.get_running_loop()
        started_s = self._clock.monotonic_s()
        warn_of_settings_without_effect(self._config)
        check_default_schedule(self._config)
        # The start does not wait for it because a resolver may be slow.
        self.spawn(warn_of_unknown_hosts(self._config), name="hosts")
        await self._open_logs()
        self._schedules = Schedules(self._clock, local_timezone())
        self._make_context(started_s)
        await self._open_transactions()
        queues = self._queues = self.context.queues = QueueService(self.context)
        await self.start_owned(queues)
        if self._config.replication is None:
            self._delays = self.context.delays = DelayService(self.context)
            await self.start_owned(self._delays)
        self._listen(queues)
        data_path = Path(self._config.system.data_path)
        await self.start_owned(
            AdminServer(
                self._fs,
                data_path,
                partial(perform, self.control),
                stop_timeout_s=PART_STOP_S_MAX,
            )
        )
        await self.start_owned(self._housekeeping)
        await self._begin_http()
        # Last, because it may wait for ZooKeeper; everything else already works.
        await self._advertise()
        _log.info(
            "broker started: broker=%d address=%s data=%s logs=%d duration_ms=%d",
            self._config.system.broker_id,
            self.address,
            data_path,
            len(self._logs.logs()),
            (self._clock.monotonic_s() - started_s) * 1000,
        )

    async def _open_logs(self) -> None:
        self._definitions = Definitions(self._fs, self._config)
        await asyncio.wrap_future(
            start_call("metaq-definitions", self._definitions.load)
        )
        # Recovery needs the settings, and only then it is known which topics have data.
        self._add_defined_topics(has_log=lambda _topic: True)
        post, syncs = post_to(self._loop), self._open_syncs()
        self._logs = LogManager(self._fs, self._clock, post, self._config, syncs=syncs)
        self.on_way_down("logs", self._close_logs)
        opening = asyncio.wrap_future(start_call("metaq-opening", self._read_logs))
        try:
            await asyncio.shield(opening)
        except asyncio.CancelledError:
            # The thread cannot be cancelled: let it stop early, and wait for it.
            self._logs.cancel_open()
            with contextlib.suppress(MetaqError):
                await opening
            raise
        topics = {log_id.topic for log_id in self._logs.logs()}
        self._add_defined_topics(has_log=topics.__contains__)

    def _read_logs(self) -> None:
        """Recover the data directories; blocks."""
        if self._config.replication is None:
            set_file = Path(self._config.system.data_path) / SET_FILE
            if self._fs.exists(set_file):
                # Alone, it would serve bytes that were never acknowledged, and the set
                # would miss the messages that it accepts.
                raise ConfigError(
                    f"{set_file.parent} belongs to a replica of a set: add"
                    f" [replication] with its replicaId, or remove {set_file} to take"
                    " it out of the set for good"
                )
            self._logs.open(left_out=self._definitions.deleting)
            return
        from metaq.broker.replica_part import open_set  # noqa: PLC0415  # large, and most brokers are no replica

        paths = data_paths(self._config)
        self._set_facts = open_set(self._fs, self._config, self._logs, paths)

    def _open_syncs(self) -> KernelSyncs | None:
        """Create the poller of the sockets, and asynchronous syncs if available."""
        syncs = self._fs.open_syncs()

        self._poller = Poller(self._loop)
        if syncs is not None:
            self._poller.add_reader(syncs.fileno(), syncs.reap)

        async def close() -> None:
            if syncs is not None and not syncs.is_idle:
                return  # a late sync still holds its files and their lock
            self._poller.close()
            if syncs is not None:
                syncs.close()

        self.on_way_down("syncs", close)
        return syncs

    def _add_defined_topics(self, *, has_log: Callable[[str], bool]) -> None:
        """Add the topics of the known definitions to the configuration."""
        defined = self._definitions.decide(self._config, has_log=has_log)
        self._config = replace(self._config, defined=defined)

    async def _open_transactions(self) -> None:
        """Recover the transaction journal and move its commits to the partitions.

        If the journal cannot be opened, the broker serves everything but transactions;
        if another broker has locked it, the start fails.
        """
        if self._config.replication is not None:
            self.context.transactions.disable(TransactionError(NO_TRANSACTIONS))
            return
        self._opening = JournalOpening(self._fs, self._journal, self._logs)
        self.on_way_down("transactions", self._close_transactions)
        opening = start_call("metaq-journal", self._opening.run)
        try:
            opened = await asyncio.shield(asyncio.wrap_future(opening))
        except LogDirLockedError:
            raise
        except StorageError as error:
            self.context.ids.advance_to(self._opening.next_id)
            self._on_journal_refused(error)
            return
        settled = asyncio.Event()
        self._begin_transactions(opened, settled.set)
        await settled.wait()

    def _begin_transactions(
        self, opened: OpenedJournal, on_settled: Callable[[], None]
    ) -> None:
        self._opening = None
        self.context.ids.advance_to(opened.next_id)
        self._journal.start()
        self.context.transactions.restore(opened, on_settled)

    def _on_journal_refused(self, error: StorageError) -> None:
        """Disable transactions until there is free space, or until a restart."""
        self.context.transactions.disable(error)
        if isinstance(error, NoSpaceError):
            _log.error("transactions are offline until there is free space: %s", error)
            return
        self._opening = None
        self._journal.abandon()
        _log.error("transactions are offline until a restart: error=%s", error)

    def _retry_opening(self) -> Work | None:
        """Return work that opens the journal again, if it lacked space at the start."""
        opening = self._opening
        if opening is None:
            return None

        def work() -> Finish:
            try:
                opened = opening.run()
            except NoSpaceError:
                raise  # counted by the job, which will try again
            except StorageError as error:
                return partial(self._on_journal_refused, error)
            return partial(self._begin_transactions, opened, lambda: None)

        return work

    def _make_context(self, started_s: float) -> None:
        self._upkeep = self._begin_threads("upkeep", UPKEEP_THREADS)
        config, limits = self._config, self._config.limits
        for directory in self._logs.directories():
            directory.reader.begin()
        topics = Topics(config, self._logs, choose=self._choose)
        turns = Turns(partial(call_after_sockets, self._loop))
        topics.withdraw(self._definitions.deleting)
        if config.replication is not None:
            # The port opens before the broker has joined its set.
            topics.refuse(NotLeaderError("this replica of a set is starting"))
        self.context = BrokerContext(
            config=config,
            clock=self._clock,
            topics=topics,
            transactions=self._make_coordinator(topics),
            ids=self._make_ids(),
            realtime=Realtime(self._clock),
            waiters=Waiters(self._loop, turns),
            load=Load(limits.in_flight_bytes_max),
            turns=turns,
            filter_work=PacedWork(self._loop, turns, limits.filter_bytes_per_s),
            fs=self._fs,
            upkeep=self._upkeep,
            address="",
            port=0,
            started_s=started_s,
            key_builder=KeyBuilder(limits.index_bytes_per_s),
        )

    def _begin_threads(self, name: str, count: int) -> HelperThreads:
        """Start threads now, because there may be no memory for them later."""
        threads = HelperThreads(count, f"metaq-{name}").begin()
        # Queued work is not cancelled: the logs rely on a submitted retention run.
        self.on_way_down(name, threads.end)
        return threads

    def _listen(self, queues: QueueService) -> None:
        config, limits = self._config, self._config.limits
        self._single_puts = SinglePuts(self.context, self._poller.call_at_end)
        self._listener = Listener(
            loop=self._loop,
            on_connection=self._on_connection,
            connection_count_max=limits.connection_count_max,
            connection_count_per_host_max=limits.connection_count_per_host_max,
        )
        self._scrub = Scrub(
            bytes_per_s=limits.scrub_bytes_per_s,
            span_bytes_min=limits.span_bytes_min,
            first=self._clock.wall_ms(),
            on_damage=self._logs.on_damage,
        )
        self.control = Control(
            self.context,
            self._logs,
            self._schedules,
            self._fs,
            reader=self._begin_threads("reload", 1),
            scrub=self._scrub,
            definitions=self._definitions,
            overrides=self._overrides,
            listener=self._listener.statistics,
            state=lambda: self.state,
            on_change=self._on_reloaded,
        )
        self._definitions.attach(
            self.context,
            self._logs,
            apply=self.control.apply_definitions,
            on_exchanges=self._update_registration,
        )
        self._schedules.replace_jobs(self.control.deletion_schedules(config))
        # Built before the port opens: a put that makes a log wakes it.
        jobs = BrokerJobs(
            self.context,
            self._logs,
            self.control,
            self._schedules,
            self._scrub,
            queues=queues,
            delays=self._delays,
            check_sessions=self._check_sessions,
            open_journal=self._retry_opening,
            wake=lambda: self._housekeeping.wake(),  # noqa: PLW0108  # made below
        )
        self._housekeeping = Housekeeping(
            jobs.all(),
            clock=self._clock,
            executor=self._upkeep,
            stop_timeout_s=PART_STOP_S_MAX,
        )
        self.control.jobs = self._housekeeping.statistics
        self.context.topics.on_new_log = self._on_new_log
        self.on_way_down("connections", self._drain)
        port = self._listener.open(listening_host(config), config.system.server_port)
        self._address = BrokerAddress(advertised_host(config), port)
        self.context.address, self.context.port = str(self._address), port

    def _make_ids(self) -> IdGenerator:
        broker_id, logs = self._config.system.broker_id, self._logs
        ids = IdGenerator(self._clock, broker_id, logs.last_message_id())
        if logs.newest_append_ms is not None:
            ids.advance_past(logs.newest_append_ms)
        return ids

    def _make_coordinator(self, topics: Topics) -> TransactionCoordinator:
        system, limits = self._config.system, self._config.limits
        self._journal = Journal(
            self._fs,
            self._clock,
            self._loop.call_soon_threadsafe,
            self._loop.call_soon,
            Path(system.data_log_path) / TRANSACTIONS,
            sync_mode=system.flush_tx_log_at_commit,
            checkpoints_max=system.checkpoints_max,
            file_bytes_max=limits.tx_journal_file_bytes_max,
            slow_sync_ms=limits.slow_sync_ms,
        )
        return TransactionCoordinator(
            self._fs,
            self._clock,
            self._journal,
            ServedLogs(topics).find,
            TransactionLimits(
                open_count_max=limits.tx_count_max,
                held_bytes_max=limits.tx_bytes_max,
                timed_count_max=system.tx_timer_capacity,
                timeout_s_max=system.tx_timeout_s_max,
                journal_bytes_max=limits.tx_journal_bytes_max,
            ),
        )

    async def _advertise(self) -> None:
        zookeeper = self._config.zookeeper
        if not zookeeper.is_enabled:
            await self.start_owned(self._definitions)
            return
        if problem := host_problem(self._config, self._address):
            _log.warning("loopback advertised: %s", problem)
            self.control.host_problem = problem
        coordinator = self._coordinator or ZooKeeperCoordinator(
            zookeeper.connect,
            session_timeout_ms=zookeeper.session_timeout_ms,
            clock=self._clock,
        )
        if self._config.replication is not None:
            await self._join_set(coordinator)
            return
        registration = Registration(self._config, coordinator, self._clock, self._logs)
        await self.start_owned(registration)
        self.control.registration = registration.statistics
        # Without ZooKeeper, this is the only line until the time-out ends.
        _log.info(
            "registering in zookeeper: connect=%s timeout_ms=%d",
            zookeeper.connect,
            zookeeper.connection_timeout_ms,
        )
        self._definitions.follow(coordinator, lambda: registration.statistics().state)
        await self.start_owned(self._definitions)
        self._registration = registration
        # Waits for definitions, so that topics deleted during the stop stay out.
        await registration.advertise(
            self._snapshot(), wait_definitions=self._definitions.wait_read
        )
        if self._queues is not None:
            self._queues.restart_reclaim()
        self._definitions.wake()

    async def _join_set(self, coordinator: Coordinator) -> None:
        """Join the replica set; only its leader is visible to clients."""
        from metaq.broker.replica_part import ReplicaPart  # noqa: PLC0415  # as above

        replica = self._replica = ReplicaPart(
            self.context,
            coordinator,
            fs=self._fs,
            logs=self._logs,
            facts=self._set_facts,
            snapshot=self._snapshot,
        )
        self.context.replica = replica
        self.control.registration = replica.statistics
        self.control.replica = replica.node.status
        self._definitions.follow(coordinator, lambda: replica.statistics().state)
        await self.start_owned(replica)
        await self.start_owned(self._definitions)

    async def _begin_http(self) -> None:
        limits = self._config.limits
        if not limits.http_port:
            return
        from metaq.broker.http import HttpServer  # noqa: PLC0415  # off by default, and aiohttp is large

        server = HttpServer(
            limits.http_host,
            limits.http_port,
            self.control.status,
            clock=self._clock,
            stop_timeout_s=PART_STOP_S_MAX,
        )
        await self.start_owned(server)
        self.http_port = server.port

    # -- connections ------------------------------------------------------------------

    def _on_connection(self, sock: socket.socket, host: str) -> None:
        channel = Channel(
            sock,
            loop=self._loop,
            clock=self._clock,
            room_bytes=self._config.limits.connection_buffer_bytes_max,
            readers=self._poller,
        )
        session = Session(
            channel, self.context, self._single_puts, on_closed=self._on_session_closed
        )
        self._sessions[session] = host
        session.start()

    def _on_session_closed(self, session: Session) -> None:
        self._listener.forget(self._sessions.pop(session))
        if not self._sessions:
            self._is_drained.set()

    def _check_sessions(self) -> None:
        now_s = self._clock.monotonic_s()
        timeout_s = self._config.limits.idle_timeout_ms / 1000
        for session in list(self._sessions):
            session.check(now_s, timeout_s)

    # -- logs -------------------------------------------------------------------------

    def _on_new_log(self, log_id: LogId) -> None:
        new = self._logs.get(log_id)
        assert new is not None, log_id
        self.context.waiters.on_new_log(log_id, new)
        if self._queues is not None:
            self._queues.on_new_log(log_id)
        self._schedules.replace_jobs(
            self.control.deletion_schedules(self.context.config)
        )
        self._housekeeping.wake()
        self._update_registration()

    # -- registration -----------------------------------------------------------------

    def _snapshot(self) -> BrokerSnapshot:
        topics = {log_id.topic for log_id in self._logs.logs()}
        return make_snapshot(
            self.context.config,
            self._address,
            topics,
            self._logs.claims(),
            withdrawn=self._definitions.deleting,
            exchanges=self.context.topics.exchanges,
        )

    def _on_reloaded(self) -> None:
        self._housekeeping.wake()
        self._update_registration()

    def _update_registration(self) -> None:
        if self._registration is not None:
            self._registration.update(self._snapshot())
        if self._replica is not None:
            self._replica.update()

    # -- stop -------------------------------------------------------------------------

    async def on_stop(self) -> None:
        """Withdraw while everything still works, and give clients time to notice."""
        if self._replica is not None:
            await self._replica.node.leave()
        if self._registration is None:
            return
        share_s = self._shutdown_s * WITHDRAW_SHARE
        deadline_s = self._clock.monotonic_s() + share_s
        was_there = await self._registration.withdraw(timeout_s=share_s)
        left_s = deadline_s - self._clock.monotonic_s()
        notice_s = min(left_s, self._config.zookeeper.sync_time_ms / 1000)
        if was_there and self._sessions and notice_s > 0:
            self._is_drained.clear()
            await self._wait_drained(notice_s)

    async def _drain(self) -> None:
        self._listener.close()
        self._is_drained.clear()
        for session in list(self._sessions):
            session.end("broker stops")
        if self._sessions:
            await self._wait_drained(self._shutdown_s * WITHDRAW_SHARE)
        for session in list(self._sessions):
            session.abort("broker stops")

    async def _wait_drained(self, timeout_s: float) -> None:
        """Wait until every connection is closed, or until the timeout."""
        if not await wait_set(self._is_drained, timeout_s):
            _log.info(
                "connections still open at the stop: open=%d", len(self._sessions)
            )

    async def _close_transactions(self) -> None:
        if self._opening is not None:
            # A thread may still be opening the journal: make it close that.
            abandon = self._opening.abandon
            await asyncio.wrap_future(start_call("metaq-journal", abandon))
            return
        closed = asyncio.Event()
        self.context.transactions.close(closed.set)
        await closed.wait()

    async def _close_logs(self) -> None:
        closed = asyncio.Event()
        self._logs.close(closed.set)
        try:
            await closed.wait()
        except asyncio.CancelledError:
            self._logs.abandon()
            raise


def check_default_schedule(config: BrokerConfig) -> None:
    """Refuse a wrong default deleteWhen, even if every topic now has its own.

    Raises:
        ConfigError: the message names file and key.
    """
    try:
        parse_schedule(config.system.delete_when, local_timezone())
    except ConfigError as error:
        raise ConfigError(f"{config.path}: [system] deleteWhen: {error}") from error


async def warn_of_unknown_hosts(config: BrokerConfig) -> None:
    """Log configured hosts that do not resolve (a typing mistake, or DNS is down)."""
    finding = start_call("metaq-hosts", partial(find_unknown_hosts, config))
    for sentence in await asyncio.wrap_future(finding):
        _log.warning("host unknown: %s", sentence)


def warn_of_settings_without_effect(config: BrokerConfig) -> None:
    """Log settings without effect here: supported by MetaQ only, or mistyped."""
    for section in config.ignored_sections:
        _log.warning("section ignored: section=[%s] file=%s", section, config.path)
    for sentence in config.shadowed:
        _log.warning(
            "setting without effect on a topic, its section wins: %s", sentence
        )
    for topic in config.topics.values():
        for group, name in topic.filters.items():
            _log.warning(
                "filter without effect, its group gets every message:"
                " topic=%s group=%s class=%s",
                topic.name,
                group,
                name,
            )
