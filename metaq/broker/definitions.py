"""Topics, queue groups and exchanges made by command, applied by a running broker.

Theory of operation. One task runs one pass after each event: a definition in ZooKeeper
changed, `server.ini` was reloaded, the session is connected again, a deletion could not
be completed. Each pass takes these steps, in this order:

    decide          which definitions are in effect (`defined_topics.py`), from
                    ZooKeeper, or from the copy on disk until ZooKeeper has been read
    write the copy  before anything relies on it: after a kill, or a start without
                    ZooKeeper, topics have the same partitions and retention, and
                    topics in deletion are not served
    put in effect   as a reload does
    the others      queue groups and exchanges (`followed_definitions.py`): write their
                    copies, then put them in effect
    delete          withdraw topics and move their data aside
    publish         the status of each definition, in ZooKeeper
    finish          remove the definition of a topic that no broker has any more

A failed pass is repeated with a growing delay; until then an alarm shows the reason.

    Invariant: before data of a topic is removed, the copy on disk has the deletion.

Keep in step: `defined_topics.py`, `metaq/zk/deletion.py`, docs/storage.md.
"""

import asyncio
import logging
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Final, TypeVar

from metaq.broker.context import BrokerContext
from metaq.broker.defined_topics import Decisions, Found, decide
from metaq.broker.exchanges import Exchanges
from metaq.broker.followed_definitions import FollowedDefinitions
from metaq.config.settings import BrokerConfig, TopicConfig
from metaq.errors import CoordinationError, MetaqError, StorageError
from metaq.filter.language import ANY_FILTER, parse_filter
from metaq.fs import FileSystem
from metaq.fs.helper_threads import HelperThreads
from metaq.lifecycle import Service
from metaq.model import BrokerId
from metaq.retry import Backoff, wait_set
from metaq.storage.log_manager import LogManager
from metaq.storage.log_removal import outcome_of
from metaq.zk.children import ChildrenOfEach, Settler, ValuesWatch
from metaq.zk.definitions import (
    COPY_BYTES_MAX,
    COPY_NAME,
    Effect,
    TopicDefinition,
    TopicStatus,
    decode_copy,
    decode_definition,
    encode_copy,
    encode_definition,
    encode_status,
    or_error,
)
from metaq.zk.deletion import finish_deletion
from metaq.zk.errors import PayloadError
from metaq.zk.exchange_definitions import (
    EXCHANGES_COPY_NAME,
    ExchangeDefinition,
    decode_exchange,
    encode_copied,
)
from metaq.zk.exchange_watch import ExchangeWatch
from metaq.zk.group_definitions import (
    GROUPS_COPY_NAME,
    QueueGroupDefinition,
    decode_group,
    encode_group,
    wants_parser,
)
from metaq.zk.paths import NodeKind, NodePaths, normalize_root
from metaq.zk.registry import RegistrationState
from metaq.zk.session import Cancel, Coordinator, SessionState

_log = logging.getLogger(__name__)

OPERATION_TIMEOUT_S: Final = 5.0
PATIENCE: Final = Backoff(first_s=0.2, max_s=10.0)
"""Delay after a pass that failed, or that waits for other brokers."""
GROUPS_REMEMBERED_MAX: Final = 10_000
T = TypeVar("T")

_OURS: Final = frozenset({RegistrationState.PENDING, RegistrationState.REGISTERED})


_decode_group = lru_cache(GROUPS_REMEMBERED_MAX)(partial(or_error, decode_group))


class Definitions(Service):
    """Follows and applies the definitions. Owned by the app.

    Call `load` and `decide` before the start; afterwards the task of this service works
    on its own. `wake` requests a pass.
    """

    def __init__(self, fs: FileSystem, config: BrokerConfig) -> None:
        """Prepare the service; nothing is read yet."""
        super().__init__("definitions", stop_timeout_s=2.0)
        self._fs = fs
        self._broker_id = BrokerId(config.system.broker_id)
        self._path = Path(config.system.data_path) / COPY_NAME
        self._paths = NodePaths(normalize_root(config.zookeeper.root))
        self._copied: Mapping[str, TopicDefinition] | None = None
        self._groups = FollowedDefinitions[bytes, QueueGroupDefinition](
            "queue group",
            "its next worker writes it again; to delete the group, wait for that first",
            self._path.with_name(GROUPS_COPY_NAME),
            encode_group,
            _decode_group,
            lambda each: each.generation,
        )
        self._exchanges = FollowedDefinitions[
            ExchangeDefinition | str, ExchangeDefinition
        ](
            "exchange",
            f"make it again, with its bindings, which {EXCHANGES_COPY_NAME} of the data"
            " directory has until then, or delete it after that",
            self._path.with_name(EXCHANGES_COPY_NAME),
            encode_copied,
            lambda each: each,
        )
        self._groups_in_effect: (
            tuple[Mapping[str, QueueGroupDefinition], Mapping[str, str]] | None
        ) = None
        self._removed: set[str] = set()
        self._published: dict[str, TopicStatus | None] = {}
        self._published_session_version = 0
        self._held_up: dict[str, str] = {}
        self._logged: tuple[str, ...] = ()
        self._error = ""
        self._failures = 0
        self._unfinished = 0
        self._in_effect: tuple[Decisions, bool] | None = None
        self._wake = asyncio.Event()
        # A separate thread, because its disk may hang.
        self._writer = HelperThreads(1, "metaq-definitions")
        self._has_read = asyncio.Event()
        self._watch: ValuesWatch[TopicDefinition | str] | None = None
        self._log_groups = ChildrenOfEach(lambda: None)
        """Queue group → members of the log group with its name."""
        self._topics = ChildrenOfEach(self._wake.set)
        """Exchange → brokers that have a readable topic with its name."""
        self._puts = ChildrenOfEach(self._wake.set)
        """Exchange → brokers that take puts under its name, topic or exchange."""
        self._recorded = ChildrenOfEach(self._wake.set)
        """Under the key "": brokers of this package, which alone leave a record."""
        self._coordinator: Coordinator | None = None
        self._outcome = decide(None, {}, config, has_log=lambda _topic: False)
        self._is_known = not config.zookeeper.is_enabled

    # -- before the start -------------------------------------------------------------

    def load(self) -> None:
        """Read the copies; blocks.

        Without a readable copy, definitions are known once ZooKeeper is read.

        Raises:
            StorageError: a copy exists and the disk cannot read it.
        """
        self._copied = self._load(self._path, decode_definition)
        self._is_known |= self._copied is not None
        self._groups.values = self._load(self._groups.path, decode_group) or {}
        self._exchanges.values = self._load(self._exchanges.path, decode_exchange) or {}

    def _load(self, path: Path, decode: Callable[[bytes], T]) -> dict[str, T] | None:
        try:
            return decode_copy(self._fs.read_file(path, COPY_BYTES_MAX), decode)
        except PayloadError as error:
            _log.error(
                "copy of definitions is left out until zookeeper is read:"
                " file=%s error=%s",
                path,
                error,
            )
        except StorageError as error:
            if self._fs.exists(path):
                raise
            _log.debug("no copy of definitions: error=%s", error)
        return None

    def decide(
        self, config: BrokerConfig, *, has_log: Callable[[str], bool]
    ) -> Mapping[str, TopicConfig]:
        """Decide now; return the defined topics, which `server.ini` overrides."""
        found = self._found()
        self._outcome = decide(
            found, self._copied or {}, config, has_log=has_log, removed=self._removed
        )
        self._is_known |= found is not None
        return self._outcome.defined

    # -- for the broker ---------------------------------------------------------------

    @property
    def deleting(self) -> frozenset[str]:
        """Topics in deletion, until all brokers have finished it."""
        return self._outcome.deleting

    def has_settings(self, topic: str, config: BrokerConfig) -> bool:
        """Return whether the settings of a topic are known, so that retention may run.

        Without the copy, and before ZooKeeper is read, a topic without a section in
        `server.ini` may have a definition with a longer retention.
        """
        if topic in config.topic_names:
            return True
        return self._is_known and topic not in self._outcome.refused

    def problems(self) -> tuple[str, ...]:
        """Return one sentence for each thing that needs an operator's attention."""
        held_up = [
            f"topic '{topic}' is withdrawn and not yet deleted: {error}"
            for topic, error in sorted(self._held_up.items())
        ]
        errors = filter(None, [self._error])
        return (*self._lasting_problems(), *held_up, *errors)

    def _lasting_problems(self) -> tuple[str, ...]:
        others = (*self._groups.problems, *self._exchanges.problems)
        beside = [
            f"exchange '{name}' has the name of a topic on broker {_ids(nodes)}, where"
            " messages go to that: delete one of the two ('metaq exchanges delete"
            f" {name}')"
            for name in sorted(self._context.topics.exchanges)
            if (nodes := self._topics_named(name))
        ]
        return (*self._outcome.problems, *others, *self._served.problems, *beside)

    def _topics_named(self, exchange: str) -> Collection[str]:
        """Return the brokers that have a topic with the name of an exchange.

        Brokers are named as their ZooKeeper nodes name them. On a Java broker, a topic
        closed to readers is registered like an exchange, for puts alone; it is a topic
        because Java brokers have no exchanges, and leave no record of themselves.
        """
        ours = self._recorded.children.get("", ())
        puts = self._puts.children.get(exchange, ()) if ours else ()
        java = {each for each in puts if each.partition("-")[0] not in ours}
        return java.union(self._topics.children.get(exchange, ()))

    def groups_both_ways(self) -> tuple[str, ...]:
        """Return the names that are both queue groups and log groups with members."""
        return tuple(sorted(self._log_groups.children))

    def wake(self) -> None:
        """Request a pass, because settings changed."""
        self._wake.set()

    def attach(
        self,
        context: BrokerContext,
        logs: LogManager,
        *,
        apply: Callable[[Mapping[str, TopicConfig], frozenset[str]], None],
        on_exchanges: Callable[[], None],
    ) -> None:
        """Set the parts that passes apply definitions to; called before the start.

        `apply` puts topic definitions in effect, and withdraws topics. Queue groups are
        applied to the queues of the context, exchanges to its topics; exchanges of the
        copy are applied now. `on_exchanges` is called after exchanges have changed.
        """
        self._context = context
        self._logs = logs
        self._apply = apply
        self._served = Exchanges(context.topics, on_exchanges)
        self._apply_exchanges()

    def follow(
        self, coordinator: Coordinator, registration: Callable[[], RegistrationState]
    ) -> None:
        """Follow ZooKeeper from the start on; without this call, only the copy is used.

        Nothing is published unless `registration` returns PENDING or REGISTERED,
        because the broker id may be another broker's.
        """
        self._coordinator = coordinator
        self._registration = registration

    async def on_start(self) -> None:
        """Start the watches and the passes."""
        # Start the thread now: a pass without memory for it would end the broker.
        self._writer.begin()
        self.on_way_down("writer", self._writer.end)
        coordinator = self._coordinator
        if coordinator is not None:
            settler = Settler(coordinator, self._is_complete, self._wake.set)
            self._watch = ValuesWatch(
                coordinator,
                self._paths.topic_definitions(),
                partial(or_error, decode_definition),
                settler.note,
            )
            self._groups.watch = groups = ValuesWatch(
                coordinator, self._paths.queue_groups(), bytes, settler.note
            )
            self._exchanges.watch = exchanges = ExchangeWatch(
                coordinator, self._paths, settler.note
            )
            cancels = [
                coordinator.add_listener(lambda _status: self._wake.set()),
                settler.cancel,
                self._watch.cancel,
                groups.cancel,
                exchanges.cancel,
                self._log_groups.cancel,
                self._topics.cancel,
                self._puts.cancel,
                self._recorded.cancel,
            ]
            self.on_way_down("watch", partial(_call_all, cancels))
        self.spawn(self._run(), name="run")

    async def wait_read(self) -> None:
        """Wait until the definitions in ZooKeeper are in effect, or a pass has failed.

        Errors of ZooKeeper do not end the wait.
        """
        await self._has_read.wait()

    # -- the task ---------------------------------------------------------------------

    async def _run(self) -> None:
        while True:
            self._wake.clear()
            await wait_set(self._wake, await self._pass_safely())

    async def _pass_safely(self) -> float | None:
        """Run one pass; return the seconds until the next one, None: when woken."""
        try:
            delay_s = await self._pass()
        except MetaqError as error:
            text = f"definitions of topics: {error}"
            is_away = isinstance(error, CoordinationError)
            if text != self._error:
                _log.log(logging.INFO if is_away else logging.ERROR, "%s", text)
            if not is_away:
                self._has_read.set()
            # A disconnected session has its own alarm.
            self._error = "" if is_away else text
            self._failures += 1
            return PATIENCE.delay_s(self._failures)
        self._error, self._failures = "", 0
        return delay_s

    async def _pass(self) -> float | None:
        config = self._context.config
        topics = {log_id.topic for log_id in self._logs.logs()}
        self.decide(config, has_log=topics.__contains__)
        outcome = self._outcome
        is_read = self._found() is not None
        if is_read and self._copied != outcome.accepted:
            encode = partial(encode_copy, outcome.accepted, encode_definition)
            await self._write_copy(self._path, encode)
            self._copied = outcome.accepted
        self._put_in_effect(outcome)
        await self._pass_others()
        problems = self._lasting_problems()
        for problem in problems:
            if problem not in self._logged:
                _log.error("%s", problem)
        self._logged = problems
        if is_read:
            self._has_read.set()
        self._removed &= outcome.deleting
        self._held_up = {
            topic: error
            for topic, error in self._held_up.items()
            if topic in outcome.deleting
        }
        due = outcome.deleting - self._removed
        replica = self._context.replica
        # Followers learn from their leader which logs are deleted.
        is_ours = replica is None or replica.is_leading
        for topic in sorted(due) if is_ours else ():
            await self._delete(topic)
        if due & self._removed:
            # Schedules and the records of the data directories depend on the logs.
            self._apply(outcome.defined, outcome.deleting)
        is_finished = not self._held_up and (is_ours or not due)
        if is_read and self._may_publish():
            is_finished &= await self._publish_and_finish(outcome)
        self._unfinished = 0 if is_finished else self._unfinished + 1
        return None if is_finished else PATIENCE.delay_s(self._unfinished)

    def _put_in_effect(self, outcome: Decisions) -> None:
        """Apply the decisions about topics, unless they are in effect already."""
        if (outcome, self._is_known) == self._in_effect:
            return
        self._in_effect = outcome, self._is_known
        _log.info(
            "definitions of topics in effect: defined=%d deleting=%s",
            len(outcome.defined),
            ",".join(sorted(outcome.deleting)) or "-",
        )
        self._apply(outcome.defined, outcome.deleting)

    async def _pass_others(self) -> None:
        """Apply the definitions of queue groups and exchanges.

        The copies on disk are written before the definitions take effect.
        """
        watch = self._groups.watch
        if watch is not None and any(map(wants_parser, watch.values.values())):
            loop = asyncio.get_running_loop()
            await loop.run_in_executor(self._context.upkeep, parse_filter, ANY_FILTER)
        for kind in (self._groups, self._exchanges):
            if kind.refresh():
                await self._write_copy(kind.path, kind.encode)
        queues, groups = self._context.queues, self._groups
        wanted = groups.values, groups.unread
        if queues is not None and wanted != self._groups_in_effect:
            self._groups_in_effect = wanted
            queues.apply_groups(*wanted)
        self._apply_exchanges()
        if self._coordinator is not None:
            self._watch_names(self._coordinator)

    def _apply_exchanges(self) -> None:
        """Apply the exchanges; those with the name of a topic are not served."""
        self._served.apply(
            self._exchanges.values,
            {*self._context.config.topic_names, *(i.topic for i in self._logs.logs())},
            self._exchanges.unread,
        )

    def _watch_names(self, coordinator: Coordinator) -> None:
        """Watch for names of groups and exchanges that Java software uses differently.

        A Java consumer may join a log group with the name of a queue group, and a Java
        broker may have a topic with the name of an exchange.
        """
        paths = self._paths
        read, put = (
            partial(paths.topic_children, kind)
            for kind in (NodeKind.TOPIC_SUB, NodeKind.TOPIC_PUB)
        )
        exchanges = self._exchanges.active()
        # Read before the puts, because our brokers write their record first.
        recorded = {"": paths.recorded_brokers()} if exchanges else {}
        self._recorded.follow(recorded, coordinator.watch_children)
        for watched, path_of, names in (
            (self._log_groups, paths.members, self._groups.active()),
            (self._topics, read, exchanges),
            (self._puts, put, exchanges),
        ):
            watched.follow(
                {each: path_of(each) for each in names}, coordinator.watch_children
            )

    async def _write_copy(self, path: Path, encode: Callable[[], bytes]) -> None:
        def write() -> None:  # encodes on the thread: there may be 10,000 bindings
            self._fs.write_atomically(path, encode())

        await asyncio.wrap_future(self._writer.submit(write))

    async def _delete(self, topic: str) -> None:
        """Delete the data of a withdrawn topic; note the error if that fails."""
        replica, transactions = self._context.replica, self._context.transactions
        error: Exception | None = None
        if replica is not None:
            await replica.bury(topic)
        self._context.waiters.end_topic(topic)
        if replica is None:
            # A start must not restore messages of the topic from the journal. (A set
            # has no transactions.)
            error = await outcome_of(partial(transactions.note_deletion, topic))
        delays = self._context.delays
        if error is None and delays is not None:
            error = await outcome_of(partial(delays.drop_topic, topic))
        if error is None:
            error = await outcome_of(partial(self._logs.delete_topic, topic))
        if error is None:
            transactions.drop_topic(topic)
            if self._context.queues is not None:
                self._context.queues.drop_topic(topic)
            self._held_up.pop(topic, None)
            self._removed.add(topic)
            _log.info("topic deleted: topic=%s", topic)
            return
        if self._held_up.get(topic) != str(error):
            _log.error("deletion delayed: topic=%s error=%s", topic, error)
        self._held_up[topic] = str(error)

    # -- ZooKeeper --------------------------------------------------------------------

    def _found(self) -> Found | None:
        watch = self._watch
        return None if watch is None or not watch.is_complete else watch.values

    def _is_complete(self) -> bool:
        return self._watch is not None and self._watch.is_complete

    def _deadline_s(self) -> float:
        return self._context.clock.monotonic_s() + OPERATION_TIMEOUT_S

    def _may_publish(self) -> bool:
        coordinator = self._coordinator
        return (
            coordinator is not None
            and coordinator.status.state is SessionState.CONNECTED
            and self._registration() in _OURS
        )

    async def _publish_and_finish(self, outcome: Decisions) -> bool:
        """Publish the status of each definition; finish completed deletions.

        Returns:
            Whether no deletion waits for other brokers.
        """
        assert self._coordinator is not None
        await self._restore_groups(self._coordinator)
        await self._publish(self._coordinator, outcome)
        is_finished = True
        for topic in sorted(self._removed):
            left = await finish_deletion(
                self._coordinator, self._paths, topic, deadline_s=self._deadline_s()
            )
            is_finished &= not left
        return is_finished

    async def _restore_groups(self, coordinator: Coordinator) -> None:
        """Write queue groups again whose generation ZooKeeper has lost.

        Otherwise the next worker would create the group with its first generation.
        """
        for name in self._groups.lost:
            path, known = self._paths.queue_group(name), self._groups.values[name]
            node = await coordinator.get(path, deadline_s=self._deadline_s())
            found = known if node is None else decode_group(node.data)
            if node is None or found.generation < known.generation:
                _log.warning("queue group is written again: group=%s", name)
                await coordinator.replace(
                    path,
                    encode_group(replace(found, generation=known.generation)),
                    version=None if node is None else node.version,
                    deadline_s=self._deadline_s(),
                )

    async def _publish(self, coordinator: Coordinator, outcome: Decisions) -> None:
        """Update the published statuses, including those left by an earlier run."""
        wanted = dict(outcome.statuses)
        for topic, error in self._held_up.items():
            wanted[topic] = TopicStatus(
                definition=outcome.accepted[topic].checksum,
                effect=Effect.DELETING,
                text=error,
            )
        session_version = coordinator.status.session_version
        if session_version != self._published_session_version:
            self._published = await self._read_published(coordinator)
            self._published_session_version = session_version
        # A topic not deleted yet keeps its status, so that others wait for this broker.
        busy = outcome.deleting - self._removed
        for topic in sorted(self._published.keys() - wanted.keys() - busy):
            path = self._paths.topic_status(topic, self._broker_id)
            await coordinator.delete(path, deadline_s=self._deadline_s())
            del self._published[topic]
        for topic, status in sorted(wanted.items()):
            if self._published.get(topic) != status:
                path = self._paths.topic_status(topic, self._broker_id)
                data = encode_status(status)
                await coordinator.set_or_create(
                    path, data, deadline_s=self._deadline_s()
                )
                self._published[topic] = status

    async def _read_published(
        self, coordinator: Coordinator
    ) -> dict[str, TopicStatus | None]:
        """Return the topics that have a status of this broker, each with None."""
        parent = self._paths.topics_with_status()
        names = await coordinator.children(parent, deadline_s=self._deadline_s())
        found: dict[str, TopicStatus | None] = {}
        for topic in names:
            path = self._paths.topic_status(topic, self._broker_id)
            if await coordinator.exists(path, deadline_s=self._deadline_s()):
                found[topic] = None
        return found


def _ids(nodes: Iterable[str]) -> str:
    return " and ".join(sorted({each.partition("-")[0] for each in nodes}))


async def _call_all(cancels: Iterable[Cancel]) -> None:
    for cancel in cancels:
        cancel()
