"""Administration of a running broker: the status of all parts, and reloads.

Used by orders (`orders.py`), SIGHUP and `/metrics`. A reload applies all topics and
schedules or none; if the file is wrong, the old settings stay in effect, and the error
is raised and remains in `status` until a reload succeeds. Only reading the file leaves
the loop, because its disk may hang. Concurrent reloads run one after another.

Source: docs/metaq-1.4/broker.md 2.10, 4.5.
"""

import asyncio
import logging
from collections.abc import Callable, Mapping
from concurrent.futures import Executor, Future
from dataclasses import replace
from pathlib import Path
from typing import Final

from metaq.broker.context import BrokerContext
from metaq.broker.definitions import Definitions
from metaq.broker.schedule import Schedules
from metaq.broker.status import (
    BrokerStatus,
    DirectoryStatus,
    JobStatus,
    RetentionStatus,
)
from metaq.config.load import Reload, reload_config
from metaq.config.settings import BrokerConfig, TopicConfig
from metaq.errors import AdminError, ConfigError, StorageError
from metaq.fs import FileSystem
from metaq.lifecycle import State
from metaq.model import SizeBytes, is_internal
from metaq.net.listener import ListenerStatistics
from metaq.protocol.version import SERVER_VERSION
from metaq.replication.facts import ReplicaStatus
from metaq.storage.log_manager import LogManager
from metaq.storage.scrub import Scrub
from metaq.zk.registry import RegistrationStatistics

_log = logging.getLogger(__name__)

CONFIG_BYTES_MAX: Final = SizeBytes(16 * 1024 * 1024)

CONFIG_READ_S_MAX: Final = 5.0
"""Maximum time to read the file of a reload, in seconds; callers wait for longer."""


class Control:
    """Administration of one broker. Owned by the app; used on the loop's thread."""

    def __init__(
        self,
        context: BrokerContext,
        logs: LogManager,
        schedules: Schedules,
        fs: FileSystem,
        *,
        reader: Executor,
        scrub: Scrub,
        definitions: Definitions,
        overrides: Mapping[str, str],
        listener: Callable[[], ListenerStatistics],
        state: Callable[[], State],
        on_change: Callable[[], None],
    ) -> None:
        """Administer these parts; `on_change` is called after each reload."""
        self.context = context
        self._logs = logs
        self._schedules = schedules
        self._fs = fs
        self._reader = reader
        self._scrub = scrub
        self._definitions = definitions
        self._overrides = dict(overrides)
        self._on_change = on_change
        self._listener = listener
        self._state = state
        self._reload_count = 0
        self._reload_error = ""
        self._reload_turn = asyncio.Lock()
        self._reading: Future[bytes] | None = None
        self.retention = RetentionStatus()
        self.jobs: Callable[[], tuple[JobStatus, ...]] = tuple
        """Returns a snapshot of the housekeeping; () before it exists."""
        self.host_problem = ""
        """Why clients elsewhere cannot reach the advertised address; "" if they can."""
        self.registration: Callable[[], RegistrationStatistics | None] = lambda: None
        """Returns a snapshot of the registration; None without ZooKeeper."""
        self.replica: Callable[[], ReplicaStatus | None] = lambda: None
        """Returns the status of its replica; None outside a replica set."""

    def status(self) -> BrokerStatus:
        """Return a snapshot of the whole broker."""
        context = self.context
        scrub = self._scrub.state()
        return BrokerStatus(
            version=SERVER_VERSION,
            broker_id=context.config.system.broker_id,
            address=context.address,
            state=self._state(),
            uptime_s=context.clock.monotonic_s() - context.started_s,
            config_path=context.config.path,
            config_checksum=context.config.checksum,
            connection_count_max=context.config.limits.connection_count_max,
            listener=self._listener(),
            commands=context.counters.copy(),
            waiting_count=context.waiters.count,
            in_flight_bytes=context.load.in_flight_bytes,
            partial_bytes=context.load.partial_bytes,
            reply_bytes=context.load.reply_bytes,
            dropped_count=context.load.dropped_count,
            logs=tuple(
                each.statistics() for _, each in sorted(self._logs.logs().items())
            ),
            directories=tuple(
                DirectoryStatus(
                    path=str(each.path),
                    size_bytes=each.size_bytes,
                    free_bytes=each.free_bytes,
                    free_bytes_min=each.free_bytes_min,
                    is_low_on_space=each.is_low_on_space,
                    offline_cause=None
                    if each.offline_cause is None
                    else str(each.offline_cause),
                    is_silent=each.watch.is_silent,
                    is_read_only=each.is_read_only,
                )
                for each in self._logs.directories()
            ),
            scrub=scrub if scrub.is_enabled else None,
            put_latency=context.put_latency.snapshot(),
            sync_latency=self._logs.sync_latency(),
            registration=self.registration(),
            replica=self.replica(),
            host_problem=self.host_problem,
            reload_count=self._reload_count,
            reload_error=self._reload_error,
            closed_partitions=context.topics.closed_partitions(),
            retention=self.retention,
            definition_problems=self._definitions.problems(),
            queue_groups=context.queues.status() if context.queues else (),
            groups_both_ways=self._definitions.groups_both_ways(),
            queue_problems=context.queues.problems() if context.queues else (),
            delays=context.delays.status() if context.delays else None,
            mailboxes=context.mailboxes.statistics(),
            jobs=self.jobs(),
            # A replica set has no transactions, which needs no alarm.
            transactions=None
            if context.config.replication
            else context.transactions.figures(),
            tx_in_doubt_alarm_ms=context.config.limits.tx_in_doubt_alarm_ms,
        )

    # -- reload -----------------------------------------------------------------------

    async def reload(self) -> Reload:
        """Read the configuration file again and apply its topics and schedules.

        Raises:
            AdminError: there is no file, or its disk hangs.
            StorageError: the file cannot be read.
            ConfigError: the file is wrong; the old settings stay in effect.

        Cancellation: nothing is applied.
        """
        async with self._reload_turn:
            return await self._reload()

    async def _reload(self) -> Reload:
        try:
            outcome = self._take_over(await self._read_config())
        except (AdminError, ConfigError, StorageError) as error:
            self._reload_error = str(error)
            _log.error("reload failed, old settings stay: error=%s", error)
            raise
        self._reload_error = ""
        self._reload_count += 1
        _log.info(
            "configuration reloaded: added=%s removed=%s changed=%s needs_restart=%s",
            ",".join(outcome.added) or "-",
            ",".join(outcome.removed) or "-",
            ",".join(outcome.changed) or "-",
            "; ".join(outcome.needs_restart) or "-",
        )
        return outcome

    async def _read_config(self) -> bytes:
        path = self.context.config.path
        if not path:
            raise AdminError("this broker was started without a configuration file")
        late = f"the configuration file was not read in time: file={path}"
        if self._reading is not None and not self._reading.done():
            raise AdminError(f"{late}, an earlier reload still waits for it")
        self._reading = self._reader.submit(
            self._fs.read_file, Path(path), CONFIG_BYTES_MAX
        )
        try:
            async with asyncio.timeout(CONFIG_READ_S_MAX):
                return await asyncio.wrap_future(self._reading)
        except TimeoutError as error:
            raise AdminError(f"{late} timeout_s={CONFIG_READ_S_MAX:g}") from error

    def _take_over(self, data: bytes) -> Reload:
        outcome = reload_config(self.context.config, data, self._overrides)
        self._put_in_effect(outcome.config)
        self._definitions.wake()
        return outcome

    def _put_in_effect(self, config: BrokerConfig) -> None:
        context = self.context
        # First, because only this step can fail; it replaces all schedules or none.
        self._schedules.replace_jobs(self.deletion_schedules(config))
        context.config = config
        context.topics.apply(config)
        self._logs.apply_settings(config)
        self._on_change()

    def apply_definitions(
        self, defined: Mapping[str, TopicConfig], deleting: frozenset[str]
    ) -> None:
        """Put topics made by command in effect, as a reload does.

        Sections of the file override `defined`; topics in `deleting` are withdrawn.
        """
        context = self.context
        context.topics.withdraw(deleting)
        self._put_in_effect(replace(context.config, defined=defined))

    def deletion_schedules(self, config: BrokerConfig) -> dict[str, str]:
        """Return topic → quartz expression, of all topics whose settings are known."""
        logs = {i.topic for i in self._logs.logs() if not is_internal(i.topic)}
        topics = {*config.topic_names, *logs}
        return {
            topic: config.topic(topic).delete_when
            for topic in topics
            if self._definitions.has_settings(topic, config)
        }
