"""Topics made, altered, deleted and described: through ZooKeeper, by brokers of ours.

Theory of operation. A command writes the definition of a topic (`metaq.zk.definitions`)
and waits until each broker that has to do with it has published its status. Brokers
take definitions up at once, and a command that ends early takes nothing back: what it
wrote stays, and brokers that come later do their part.

    create   written only where nothing is known of the name
    alter    written over the version that was read
    delete   marked; the brokers remove data, records and at last the definition

Brokers of MetaQ 1.4 know nothing of all this, and differ by the record that
brokers of ours keep (`/catalog/brokers`).
"""

import asyncio
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Final, Literal

from metaq.client.admin.broker_admin import AdminCall
from metaq.client.admin.cluster_admin import AdminGroup
from metaq.client.admin.exchange_admin import (
    AsyncExchangeAdmin,
    exchanges_to,
    is_exchange,
)
from metaq.client.cluster.context import ClientContext
from metaq.client.errors import NoTopicError, TopicExistsError, TopicRefusedError
from metaq.client.names import (
    check_topic,
    check_topics,
    name_few,
    near_topics,
    require_text,
)
from metaq.client.validation import check_whole
from metaq.cluster_snapshot import ClusterSnapshot
from metaq.config.keys import PARTITION_COUNT_MAX
from metaq.config.load import define_topic
from metaq.config.settings import SystemConfig
from metaq.errors import (
    ClientError,
    ConfigError,
    CoordinationError,
    NoBrokerError,
    RequestTimeoutError,
)
from metaq.model import BrokerId, no_items
from metaq.zk.definitions import (
    Effect,
    TopicDefinition,
    TopicState,
    TopicStatus,
    decode_definition,
    decode_status,
    encode_definition,
)
from metaq.zk.deletion import brokers_with
from metaq.zk.errors import CoordinationTimeoutError, NodeChangedError, PayloadError
from metaq.zk.znodes import Node

Brokers = Collection[int] | Literal["all"]
"""Brokers that serve a topic: those of these ids, or all, later ones too."""
TOPICS_NEEDED: Final = "topics are made and described through"
POLL_S: Final = 0.05
"""Interval of looks at the brokers' statuses, seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TopicOnBroker:
    """A topic on one broker."""

    broker_id: BrokerId
    is_there: bool
    """Whether its leader is registered."""
    partitions: int | None
    """Partitions that it serves now, or has recorded when it is away; None: none."""
    effect: Effect | None
    """Result of the present definition there; None: not reported yet, or there is no
    definition."""
    is_hidden: bool = False
    """It serves the topic, and registers it neither for producers nor for consumers."""
    text: str = ""
    """The file that wins, why the definition is refused or not yet deleted, or to whom
    the topic is closed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TopicDescription:
    """A topic at one moment."""

    topic: str
    definition: TopicDefinition | None
    """Its definition; None: it was not made by command, or see `problem`."""
    brokers: tuple[TopicOnBroker, ...]
    """Brokers that serve it or have data of it, ids ascending."""
    problem: str = ""


class AsyncAdmin(AsyncExchangeAdmin):
    """Administration of a cluster. Made by `AsyncClient.admin`; holds nothing.

    Topics and groups need ZooKeeper. Topics also need brokers of this package: those of
    MetaQ 1.4 take topics from their `server.ini` alone. A call with `plan=True` only
    returns what it would change.
    """

    async def create_topic(
        self,
        topic: str,
        *,
        partitions: int,
        brokers: Brokers = "all",
        settings: Mapping[str, str] = no_items(),
        timeout: float | None = None,
    ) -> TopicDescription:
        """Make a topic, and wait until its brokers serve it.

        Args:
            topic: its name.
            partitions: on each of its brokers, 1 or more.
            brokers: ids of those that serve it; "all": every broker, also those that
                come later.
            settings: keys of a topic section of `server.ini` and the text of their
                values: `{"deletePolicy": "delete,72h"}`.
            timeout: seconds; None takes `request_timeout_s`.

        Returns:
            The topic as its brokers serve it.

        Raises:
            ConfigError: name, number or settings cannot be; or the client has no
                ZooKeeper.
            TopicExistsError: there is one of that name.
            NoBrokerError: no broker that can is there, or not all that are named.
            TopicRefusedError: a broker cannot serve it like that; it is made, and may
                be altered or deleted.
            RequestTimeoutError: not all have it in time; it is made, and they will.
            CoordinationError: ZooKeeper cannot be asked.
            TypeError: an argument of another type; the text names it.

        Cancellation: it may be made.
        """
        context = self._context
        deadline_s = await context.reach(timeout)
        definition = _checked(
            topic,
            TopicDefinition(
                partitions=partitions,
                brokers=_broker_ids(brokers),
                settings=_settled({}, settings),
            ),
        )
        # Members of groups list their topics with commas between them.
        check_topics((topic,))
        here = _Topic(context, topic, deadline_s)
        able = await here.able_brokers(definition)
        exists = f"topic '{topic}' exists"
        if await is_exchange(context, topic, timeout):
            raise TopicExistsError(f"{exists}: it is the name of an exchange")
        before = await here.describe()
        old = before.definition
        if old is not None and old.state is TopicState.DELETING:
            raise TopicExistsError(f"{exists}: it is being deleted, {_left(before)}")
        # The client's snapshot may still show a topic that has just gone.
        holders = await brokers_with(
            here.coordinator, context.paths, topic, deadline_s=deadline_s
        )
        if old or before.problem or holders:
            raise TopicExistsError(f"{exists}: {_whereabouts(before)}")
        try:
            await here.define(definition, None)
        except NodeChangedError as error:
            raise TopicExistsError(f"{exists}: it was made at this moment") from error
        return await here.wait_taken_up(definition, able)

    async def alter_topic(
        self,
        topic: str,
        *,
        partitions: int | None = None,
        brokers: Brokers | None = None,
        settings: Mapping[str, str] = no_items(),
        timeout: float | None = None,
    ) -> TopicDescription:
        """Change a topic, and wait until its brokers serve it like that.

        A topic that is served without a definition gets one.

        Args:
            topic: its name.
            partitions: on each of its brokers, not fewer than now; None: as now.
            brokers: the brokers that serve it; None: as now. Messages on others stay
                readable.
            settings: other settings; a blank text goes back to the default.
            timeout: seconds; None takes `request_timeout_s`.

        Returns:
            The topic as its brokers serve it now.

        Raises:
            NoTopicError: nothing is known of it.
            ConfigError: fewer partitions than now, or settings that cannot be.
            TopicRefusedError: a broker cannot serve it like that, or goes by its
                `server.ini`; the change is made.
            ClientError: it is being deleted, or was altered by another client
                in between; nothing is done.
            MetaqError: as `create_topic`.

        Cancellation: it may be altered.
        """
        here = await self._reach(topic, timeout)
        # First: what others change from here on is not overwritten.
        node = await here.read()
        before = await here.describe_known()
        old = before.definition
        if before.problem:
            raise ClientError(f"topic '{topic}' cannot be altered: {before.problem}")
        if old is not None and old.state is TopicState.DELETING:
            raise ClientError(f"topic '{topic}' is being deleted, {_left(before)}")
        if old is None:
            counts = [each.partitions or 1 for each in before.brokers]
            ids = tuple(each.broker_id for each in before.brokers)
            old = TopicDefinition(partitions=max(counts), brokers=ids)
        if partitions is not None and partitions < old.partitions:
            raise ConfigError(
                f"topic '{topic}': partitions never become fewer, expected at least"
                f" {old.partitions}, got {partitions}"
            )
        definition = _checked(
            topic,
            replace(
                old,
                partitions=old.partitions if partitions is None else partitions,
                brokers=old.brokers if brokers is None else _broker_ids(brokers),
                settings=_settled(old.settings, settings),
            ),
        )
        able = await here.able_brokers(definition)
        await here.replace(definition, node)
        return await here.wait_taken_up(definition, able)

    async def delete_topic(self, topic: str, timeout: float | None = None) -> int:
        """Delete a topic, its data and its groups' offsets; wait until it is gone.

        Brokers that are away do their part when they come back; until then the name
        cannot be given to a new topic.

        Args:
            topic: its name.
            timeout: seconds; None takes `request_timeout_s`.

        Returns:
            How many messages waited for their time, which are gone, too; of brokers
            that can be asked.

        Raises:
            NoTopicError: nothing is known of it.
            TopicRefusedError: `server.ini` of a broker defines it, a broker of MetaQ
                1.4 serves it, or an exchange sends to it, or names it and cannot be
                read; nothing is done.
            GroupInUseError: a member reads it; nothing is done.
            ClientError: it was altered by another client in between; nothing is done.
            RequestTimeoutError: some brokers have not done their part in time; they go
                on.
            ConfigError: the client has no ZooKeeper.
            CoordinationError: ZooKeeper cannot be asked.

        Cancellation: it may go on.
        """
        here = await self._reach(topic, timeout)
        # First, as in `alter_topic`.
        node = await here.read()
        before = await here.describe_known()
        old, waiting = before.definition, 0
        with suppress(NoBrokerError):
            found = await self.scheduled(topic, count_max=0, timeout=here.left_s / 2)
            waiting = found.message_count
        if old is None or old.state is TopicState.ACTIVE:
            await here.require_deletable(before)
            await self._require_unbound(topic, here.left_s)
            counts = [each.partitions or 1 for each in before.brokers]
            old = old or TopicDefinition(partitions=max(counts, default=1))
            await here.replace(replace(old, state=TopicState.DELETING), node)
        await here.wait_gone()
        return waiting

    async def _require_unbound(self, topic: str, timeout: float) -> None:
        """Refuse to delete what exchanges send to: they would refuse all of that."""
        if bound := await exchanges_to(self._context, topic, timeout):
            raise TopicRefusedError(
                f"topic '{topic}' is not deleted: messages of exchange"
                f" {name_few(bound)} go there, and would be refused then; unbind it"
                " first, or delete the exchange"
            )

    async def describe_topic(
        self, topic: str, timeout: float | None = None
    ) -> TopicDescription:
        """Return a topic's definition, and its status on each broker.

        Args:
            topic: its name.
            timeout: seconds; None takes `request_timeout_s`.

        Raises:
            NoTopicError: nothing is known of it; the text names near topics.
            ConfigError: the client has no ZooKeeper.
            CoordinationError: ZooKeeper cannot be asked.
        """
        return await (await self._reach(topic, timeout)).describe_known()

    async def topics(
        self, timeout: float | None = None
    ) -> tuple[TopicDescription, ...]:
        """Return a description of every topic, names ascending.

        Args:
            timeout: seconds; None takes `request_timeout_s`.

        Raises:
            ConfigError: the client has no ZooKeeper.
            CoordinationError: ZooKeeper cannot be asked.
        """
        context = self._context
        deadline_s = await context.reach(timeout)
        here = AdminCall(context, deadline_s, TOPICS_NEEDED)
        names = sorted(await _topic_names(here))
        await here.read_cluster(names)
        found = [await _Topic(context, each, deadline_s).describe() for each in names]
        return tuple(each for each in found if each.definition or each.brokers)

    async def _reach(self, topic: str, timeout: float | None) -> "_Topic":
        check_topic(topic)
        return _Topic(self._context, topic, await self._context.reach(timeout))


class _Topic(AdminCall):
    """One topic, during one call of an administrator."""

    def __init__(self, context: ClientContext, topic: str, deadline_s: float) -> None:
        super().__init__(context, deadline_s, TOPICS_NEEDED)
        self._topic = topic

    # -- looking ----------------------------------------------------------------------

    async def read(self) -> Node | None:
        """Return the node of its definition."""
        return await self.get(self.paths.topic_definition(self._topic))

    async def describe_known(self) -> TopicDescription:
        """Return its description; raise NoTopicError where nothing is known."""
        found = await self.describe()
        if found.definition is None and await is_exchange(
            self.context, self._topic, self.left_s
        ):
            raise NoTopicError(f"'{self._topic}' is an exchange, and no topic")
        if found.definition is None and not found.brokers and not found.problem:
            known = await _topic_names(self)
            raise NoTopicError(
                f"there is no topic '{self._topic}'; {near_topics(self._topic, known)}"
            )
        return found

    async def describe(self) -> TopicDescription:
        """Return its definition, and its status on each broker."""
        topic, definition, problem = self._topic, None, ""
        node = await self.read()
        try:
            definition = None if node is None else decode_definition(node.data)
        except PayloadError as error:
            problem = str(error)
        snapshot = await self.read_cluster({topic})
        found = await self.values(self.paths.topic_statuses(topic), decode_status)
        statuses = {BrokerId(int(n)): one for n, one in found.items() if n.isdecimal()}
        ids = {*statuses, *_counts(snapshot, topic), *snapshot.recorded.get(topic, {})}
        if definition is not None and definition.brokers is not None:
            ids |= set(definition.brokers)
        brokers = tuple(
            _on_broker(broker_id, topic, definition, snapshot, statuses.get(broker_id))
            for broker_id in sorted(ids)
        )
        return TopicDescription(
            topic=topic, definition=definition, brokers=brokers, problem=problem
        )

    async def _recorded_brokers(self) -> tuple[str, ...]:
        """Return the ids of brokers that keep a record: those of this package."""
        return await self.children(self.paths.recorded_brokers())

    # -- making -----------------------------------------------------------------------

    async def able_brokers(self, definition: TopicDefinition) -> tuple[BrokerId, ...]:
        """Return the brokers that are there and are to serve it.

        A broker with a record in the catalog that is needed and away is waited for: one
        that restarts has no nodes for a moment.

        Raises:
            NoBrokerError: one that is named is not there, or cannot; or there is none.
        """
        unable: NoBrokerError | None = None
        while True:
            snapshot = await self.read_cluster(())
            try:
                recorded = await self._recorded_brokers()
            except CoordinationTimeoutError:
                if unable is None:
                    raise
                # The time ended in a later look: what an earlier one saw is the reason.
                raise unable from None
            ours = {BrokerId(int(each)) for each in recorded if each.isdecimal()}
            there = snapshot.leaders().keys()
            able = tuple(each for each in there if each in ours)
            missing = [i for i in definition.brokers or () if i not in able]
            if able and not missing:
                return definition.brokers or able
            awaited = ours.difference(able).intersection(missing or ours)
            unable = _unable(missing, able, [i for i in there if i not in ours])
            if not awaited or self._is_over():
                raise unable
            await asyncio.sleep(POLL_S)

    async def define(self, definition: TopicDefinition, old: Node | None) -> None:
        """Write a definition in the place of the one that was read, or of none."""
        await self.write(
            self.paths.topic_definition(self._topic),
            encode_definition(definition),
            version=None if old is None else old.version,
        )

    async def replace(self, definition: TopicDefinition, old: Node | None) -> None:
        """Write as `define`; raise ClientError where another client was faster."""
        try:
            await self.define(definition, old)
        except NodeChangedError as error:
            raise ClientError(
                f"topic '{self._topic}' was altered or bound by another client: look"
                " at it, and try again"
            ) from error

    async def wait_taken_up(
        self, definition: TopicDefinition, wanted: Collection[BrokerId]
    ) -> TopicDescription:
        """Return when all of some brokers serve it as defined."""
        topic, since_s = self._topic, self.context.clock.monotonic_s()
        while True:
            on_broker: dict[BrokerId, TopicOnBroker] = {}
            # Where ZooKeeper does not answer right now, a later look says more.
            with suppress(CoordinationError, NoBrokerError):
                found = await self.describe()
                on_broker = {each.broker_id: each for each in found.brokers}
            for each in on_broker.values():
                _require_obeyed(topic, each)
            left = [
                i for i in wanted if not _has_taken_up(on_broker.get(i), definition)
            ]
            if not left:
                return found
            if self._is_over():
                missing = ", ".join(
                    f"{i} (not there)"
                    if i in on_broker and not on_broker[i].is_there
                    else str(i)
                    for i in left
                )
                raise RequestTimeoutError(
                    f"topic '{topic}' is not served yet as defined by brokers {missing}"
                    f" (waited {self._waited(since_s)}); the definition stays, and they"
                    " take it up when they can"
                )
            await asyncio.sleep(POLL_S)

    @property
    def left_s(self) -> float:
        """Return the seconds to the deadline, 0 or more."""
        return max(0.0, self.deadline_s - self.context.clock.monotonic_s())

    def _is_over(self) -> bool:
        """Return whether there is no time for another look."""
        return self.left_s <= POLL_S

    def _waited(self, since_s: float) -> str:
        return f"{self.context.clock.monotonic_s() - since_s:.3g} s"

    # -- deleting ---------------------------------------------------------------------

    async def require_deletable(self, found: TopicDescription) -> None:
        """Raise where a broker would not delete it, or a group reads it."""
        topic = found.topic
        for each in found.brokers:
            if each.effect is Effect.OVERRIDDEN:
                raise TopicRefusedError(
                    f"topic '{topic}' is not deleted: server.ini of broker"
                    f" {each.broker_id} defines it ({each.text}); take the section"
                    f" [topic={topic}] out, and restart the broker"
                )
        recorded = await self._recorded_brokers()
        for each in found.brokers:
            if each.is_there and str(each.broker_id) not in recorded:
                raise TopicRefusedError(
                    f"topic '{topic}' is not deleted: broker {each.broker_id} is of"
                    " MetaQ 1.4, which deletes no topic"
                )
        for group in await self.children(self.paths.groups()):
            here = AdminGroup(self.context, group, self.deadline_s)
            await here.require_idle({topic})

    async def wait_gone(self) -> None:
        """Return when its definition and all that brokers have of it are gone."""
        since_s, left, is_gone = self.context.clock.monotonic_s(), "", False
        while True:
            try:
                is_gone = await self.read() is None
                found = await self.describe()
                # This client is to know of it, too.
                if is_gone and not found.brokers:
                    return
                left = _left(found)
            except (CoordinationError, NoBrokerError) as error:
                left = left or str(error)
            if self._is_over():
                if is_gone:
                    return
                raise RequestTimeoutError(
                    f"topic '{self._topic}' is marked, and not deleted yet: {left}"
                    f" (waited {self._waited(since_s)}); the brokers go on by"
                    " themselves"
                )
            await asyncio.sleep(POLL_S)


# -- looking --------------------------------------------------------------------------


async def _topic_names(here: AdminCall) -> frozenset[str]:
    names = set(await here.context.metadata.topics(deadline_s=here.deadline_s))
    for parent in (here.paths.topic_definitions(), here.paths.recorded_topics()):
        names.update(await here.children(parent))
    return frozenset(names)


def _on_broker(
    broker_id: BrokerId,
    topic: str,
    definition: TopicDefinition | None,
    snapshot: ClusterSnapshot,
    status: TopicStatus | None,
) -> TopicOnBroker:
    checksum = 0 if definition is None else definition.checksum
    # A section of server.ini wins over every definition.
    outlasting = {Effect.OVERRIDDEN, Effect.DELETING}
    if status and status.definition != checksum and status.effect not in outlasting:
        status = None
    partitions = _counts(snapshot, topic).get(broker_id)
    is_there = snapshot.leader(broker_id) is not None
    if status and status.effect is Effect.IN_EFFECT and is_there:
        # Puts and gets are registered one after the other.
        puts, gets = snapshot.puts.get(topic, {}), snapshot.gets.get(topic, {})
        served = [puts.get(broker_id)] if status.takes_puts else []
        served += [gets.get(broker_id)] if status.gives_gets else []
        partitions = served[0] if served and len(set(served)) == 1 else None
    return TopicOnBroker(
        broker_id=broker_id,
        is_there=is_there,
        partitions=partitions,
        effect=status.effect if status else None,
        is_hidden=bool(status and not (status.takes_puts or status.gives_gets)),
        text=status.text if status else "",
    )


def _counts(snapshot: ClusterSnapshot, topic: str) -> dict[BrokerId, int]:
    """Return broker → partitions: served ones, else recorded ones."""
    recorded = snapshot.recorded.get(topic, {})
    counts = {i: n for i, n in recorded.items() if snapshot.leader(i) is None}
    for served in (snapshot.gets, snapshot.puts):
        counts |= served.get(topic, {})
    return counts


# -- making ---------------------------------------------------------------------------


def _settled(
    before: Mapping[str, str], settings: Mapping[str, str]
) -> Mapping[str, str]:
    if not isinstance(settings, Mapping):
        raise TypeError(
            f"settings: expected a dict of texts, got {type(settings).__name__}"
        )
    for key, text in settings.items():
        require_text("settings", key)
        require_text(f"setting {key}", text)
    merged = {**before, **{key: text.strip() for key, text in settings.items()}}
    return MappingProxyType({key: text for key, text in merged.items() if text})


def _checked(topic: str, definition: TopicDefinition) -> TopicDefinition:
    """Return a definition that every broker would accept, as far as that is known here.

    Raises:
        ConfigError: it would not; the brokers' own check knows schedules, too.
    """
    require_text("topic", topic)
    check_whole("partitions", definition.partitions, 1, PARTITION_COUNT_MAX)
    define_topic(
        topic, definition.partitions, definition.settings, system=SystemConfig()
    )
    return definition


def _unable(
    missing: Sequence[BrokerId], able: Collection[BrokerId], java: Collection[BrokerId]
) -> NoBrokerError:
    if missing:
        why = "is of MetaQ 1.4" if missing[0] in java else "is not there"
        return NoBrokerError(
            f"broker {missing[0]} cannot be given a topic, it {why}; brokers that"
            f" can: {_listed(able)}"
        )
    return NoBrokerError(
        "no broker that can be given a topic is there; brokers of MetaQ 1.4, which"
        f" take topics from their server.ini alone: {_listed(java)}"
    )


def _require_obeyed(topic: str, found: TopicOnBroker) -> None:
    """Raise if a broker has said that it does otherwise.

    Raises:
        TopicRefusedError: it has.
    """
    if found.effect is Effect.OVERRIDDEN:
        raise TopicRefusedError(
            f"topic '{topic}': server.ini of broker {found.broker_id} wins, which has a"
            f" section of that name: {found.text}"
        )
    if found.effect is Effect.REFUSED:
        raise TopicRefusedError(
            f"broker {found.broker_id} cannot serve the topic like that: {found.text};"
            f" 'metaq topics alter {topic}' or 'metaq topics delete {topic}'"
        )


def _has_taken_up(found: TopicOnBroker | None, definition: TopicDefinition) -> bool:
    return (
        found is not None
        and found.effect is Effect.IN_EFFECT
        and (found.partitions == definition.partitions or found.is_hidden)
    )


# -- words ----------------------------------------------------------------------------


def _left(found: TopicDescription) -> str:
    """Return who has not done its part of a deletion."""
    if not found.brokers:
        return "no broker has it any more"
    each_told = (
        str(each.broker_id)
        + ("" if each.is_there else " (not there)")
        + (f" ({each.text})" if each.effect is Effect.DELETING else "")
        for each in found.brokers
    )
    return f"brokers that have it still: {', '.join(each_told)}"


def _whereabouts(found: TopicDescription) -> str:
    """Return in words where a topic comes from."""
    for each in found.brokers:
        if each.effect is Effect.OVERRIDDEN:
            return f"server.ini of broker {each.broker_id} defines it ({each.text})"
    if found.problem:
        return found.problem
    if found.definition is not None:
        return f"it is defined with {found.definition.partitions} partitions"
    return f"brokers that have it: {_listed([b.broker_id for b in found.brokers])}"


def _listed(brokers: Collection[BrokerId]) -> str:
    return ", ".join(map(str, brokers)) or "none"


def _broker_ids(brokers: Brokers) -> tuple[BrokerId, ...] | None:
    """Return the ids that a user gave, ascending; None: all brokers.

    Raises:
        ConfigError: none, or another text than "all".
        TypeError: they are of another type.
    """
    if isinstance(brokers, str):
        if brokers != "all":
            raise ConfigError(f"brokers: expected ids or 'all', got {brokers!r}")
        return None
    if not isinstance(brokers, Collection):
        raise TypeError(f"brokers: expected ids or 'all', got {brokers!r:.80}")
    if not brokers:
        raise ConfigError("brokers: expected at least one id, or 'all', got none")
    for each in brokers:
        check_whole("brokers", each, 0)
    return tuple(sorted({BrokerId(each) for each in brokers}))
