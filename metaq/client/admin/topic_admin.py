"""Administration calls that create, alter, delete and describe topics.

Theory of operation. A call writes the definition of a topic (`metaq.zk.definitions`) to
ZooKeeper and waits until each broker concerned has published its status. Brokers apply
definitions at once. A call that ends early undoes nothing: the definition stays, and
brokers that start later apply it.

    create   written only if nothing is known of the name
    alter    written over the version that was read
    delete   marked; the brokers remove data, records and finally the definition

MetaQ 1.4 brokers ignore definitions; unlike brokers of this package, they leave no
record (`/catalog/brokers`).
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
from metaq.client.options import names_calls
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
"""Brokers that serve a topic: ids, or all, including later ones."""
TOPICS_NEEDED: Final = "topics are created and described through"
POLL_S: Final = 0.05
"""Interval between checks of the brokers' statuses, in seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TopicOnBroker:
    """A topic on one broker."""

    broker_id: BrokerId
    is_there: bool
    """Whether its leader is registered."""
    partitions: int | None
    """Number of partitions that it serves or, if away, has recorded; None: none."""
    effect: Effect | None
    """Effect of the present definition there; None: not reported yet, or there is no
    definition."""
    is_hidden: bool = False
    """Whether it serves the topic but registers it neither for puts nor for gets."""
    text: str = ""
    """The file that overrides the definition, why that is refused or not yet deleted,
    or whether the topic is closed to puts or gets."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TopicDescription:
    """A topic at one moment."""

    topic: str
    definition: TopicDefinition | None
    """Its definition; None: it was not made by command, or see `problem`."""
    brokers: tuple[TopicOnBroker, ...]
    """Brokers that serve it or have data of it, ids ascending."""
    problem: str = ""
    """Why its definition cannot be read; "" if it can."""


@names_calls
class AsyncAdmin(AsyncExchangeAdmin):
    """Administration of a cluster. Created by `AsyncClient.admin`; holds no resources.

    Calls about topics and groups need ZooKeeper. Topics also need brokers of this
    package, because MetaQ 1.4 brokers only take topics from their `server.ini`. A call
    with `plan=True` only returns what it would change.
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
        """Create a topic, and wait until its brokers serve it.

        Args:
            topic: name of the topic.
            partitions: number of partitions on each of its brokers, 1 or more.
            brokers: ids of the brokers that serve it; "all": every broker, including
                later ones.
            settings: keys of a topic section of `server.ini` and their values as text:
                `{"deletePolicy": "delete,72h"}`.
            timeout: seconds; None takes `request_timeout_s`.

        Returns:
            The topic as its brokers serve it.

        Raises:
            ConfigError: name, number or settings are invalid, or the client has no
                ZooKeeper.
            TopicExistsError: a topic or exchange of that name exists.
            NoBrokerError: no broker of this package is registered, or not all that are
                named are.
            TopicRefusedError: a broker cannot serve it like that; it is created, and
                may be altered or deleted.
            RequestTimeoutError: some brokers did not serve it in time; it is created,
                and they will.
            CoordinationError: ZooKeeper cannot be asked.
            TypeError: an argument has a wrong type; the text names it.

        Cancellation: it may be created.
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
        # Group members list their topics separated by commas, so refuse one in names.
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
        # Ask ZooKeeper: the client's snapshot may still show a deleted topic.
        holders = await brokers_with(
            here.coordinator, context.paths, topic, deadline_s=deadline_s
        )
        if old or before.problem or holders:
            raise TopicExistsError(f"{exists}: {_whereabouts(before)}")
        try:
            await here.define(definition, None)
        except NodeChangedError as error:
            raise TopicExistsError(
                f"{exists}: another client has just created it"
            ) from error
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
            topic: name of the topic.
            partitions: number of partitions on each of its brokers, which cannot be
                reduced; None: unchanged.
            brokers: brokers that serve it; None: unchanged. Messages on other brokers
                stay readable.
            settings: settings to change; a blank text restores the default.
            timeout: seconds; None takes `request_timeout_s`.

        Returns:
            The topic as its brokers serve it now.

        Raises:
            NoTopicError: the topic is not known.
            ConfigError: fewer partitions than now, or invalid settings.
            TopicRefusedError: a broker cannot serve it like that, or its `server.ini`
                overrides the definition; the change is written.
            ClientError: it is being deleted, or another client altered it at the same
                time; nothing is changed.
            MetaqError: as `create_topic`.

        Cancellation: it may be altered.
        """
        here = await self._reach(topic, timeout)
        # First, so that changes of others from here on are not overwritten.
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
                f"topic '{topic}': the number of partitions cannot be reduced:"
                f" expected at least {old.partitions}, got {partitions}"
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
        """Delete a topic, its data and its groups' offsets; wait until that is done.

        Brokers that are away delete their data when they start again; until then the
        name cannot be used for a new topic.

        Args:
            topic: name of the topic.
            timeout: seconds; None takes `request_timeout_s`.

        Returns:
            The number of its delayed messages, which are deleted too, on brokers that
            can be asked.

        Raises:
            NoTopicError: the topic is not known.
            TopicRefusedError: `server.ini` of a broker defines it, a MetaQ 1.4 broker
                serves it, or an exchange sends to it (or names it and cannot be read);
                nothing is deleted.
            GroupInUseError: a member reads it; nothing is deleted.
            ClientError: another client altered it at the same time; nothing is deleted.
            RequestTimeoutError: some brokers did not finish in time; they continue.
            ConfigError: the client has no ZooKeeper.
            CoordinationError: ZooKeeper cannot be asked.

        Cancellation: the deletion may continue.
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
        """Refuse to delete a topic of an exchange, whose messages would be refused."""
        if bound := await exchanges_to(self._context, topic, timeout):
            raise TopicRefusedError(
                f"topic '{topic}' is not deleted: exchange {name_few(bound)} sends"
                " messages to it; unbind it first, or delete the exchange"
            )

    async def describe_topic(
        self, topic: str, timeout: float | None = None
    ) -> TopicDescription:
        """Return a topic's definition, and its status on each broker.

        Args:
            topic: name of the topic.
            timeout: seconds; None takes `request_timeout_s`.

        Raises:
            NoTopicError: the topic is not known; the text names similar ones.
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
    """One topic during one administration call."""

    def __init__(self, context: ClientContext, topic: str, deadline_s: float) -> None:
        super().__init__(context, deadline_s, TOPICS_NEEDED)
        self._topic = topic

    # -- looking ----------------------------------------------------------------------

    async def read(self) -> Node | None:
        """Return the node of its definition."""
        return await self.get(self.paths.topic_definition(self._topic))

    async def describe_known(self) -> TopicDescription:
        """Return its description; raise NoTopicError if it is not known."""
        found = await self.describe()
        if found.definition is None and await is_exchange(
            self.context, self._topic, self.left_s
        ):
            raise NoTopicError(f"'{self._topic}' is an exchange, not a topic")
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
        """Return the ids of recorded brokers, which are those of this package."""
        return await self.children(self.paths.recorded_brokers())

    # -- making -----------------------------------------------------------------------

    async def able_brokers(self, definition: TopicDefinition) -> tuple[BrokerId, ...]:
        """Return the registered brokers that must serve it.

        Waits for a needed broker that is recorded and away, because a broker that
        restarts is not registered for a moment.

        Raises:
            NoBrokerError: a named broker is not registered or cannot serve it, or no
                broker can.
        """
        unable: NoBrokerError | None = None
        while True:
            snapshot = await self.read_cluster(())
            try:
                recorded = await self._recorded_brokers()
            except CoordinationTimeoutError:
                if unable is None:
                    raise
                # The deadline ended a later check; the earlier one has the reason.
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
        """Write a definition, if the one that was read (or none) is unchanged."""
        await self.write(
            self.paths.topic_definition(self._topic),
            encode_definition(definition),
            version=None if old is None else old.version,
        )

    async def replace(self, definition: TopicDefinition, old: Node | None) -> None:
        """Write as `define`; raise ClientError if another client was faster."""
        try:
            await self.define(definition, old)
        except NodeChangedError as error:
            raise ClientError(
                f"topic '{self._topic}' was altered or bound by another client at the"
                " same time: check it, and try again"
            ) from error

    async def wait_taken_up(
        self, definition: TopicDefinition, wanted: Collection[BrokerId]
    ) -> TopicDescription:
        """Wait until all `wanted` brokers serve it as defined; return what they do."""
        topic, since_s = self._topic, self.context.clock.monotonic_s()
        while True:
            on_broker: dict[BrokerId, TopicOnBroker] = {}
            # If ZooKeeper does not answer, a later check may succeed.
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
                    f"{i} (away)"
                    if i in on_broker and not on_broker[i].is_there
                    else str(i)
                    for i in left
                )
                raise RequestTimeoutError(
                    f"topic '{topic}' is not served yet as defined by brokers"
                    f" {missing} (waited {self._waited(since_s)}); the definition"
                    " stays, and they apply it when they can"
                )
            await asyncio.sleep(POLL_S)

    @property
    def left_s(self) -> float:
        """Return the seconds to the deadline, 0 or more."""
        return max(0.0, self.deadline_s - self.context.clock.monotonic_s())

    def _is_over(self) -> bool:
        """Return whether there is no time for another check."""
        return self.left_s <= POLL_S

    def _waited(self, since_s: float) -> str:
        return f"{self.context.clock.monotonic_s() - since_s:.3g} s"

    # -- deleting ---------------------------------------------------------------------

    async def require_deletable(self, found: TopicDescription) -> None:
        """Raise if a broker would not delete it, or a group reads it."""
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
                    " MetaQ 1.4, which cannot delete topics"
                )
        for group in await self.children(self.paths.groups()):
            here = AdminGroup(self.context, group, self.deadline_s)
            await here.require_idle({topic})

    async def wait_gone(self) -> None:
        """Wait until its definition and all its nodes of brokers are deleted."""
        since_s, left, is_gone = self.context.clock.monotonic_s(), "", False
        while True:
            try:
                is_gone = await self.read() is None
                found = await self.describe()
                # Also wait until the snapshot of this client has no brokers for it.
                if is_gone and not found.brokers:
                    return
                left = _left(found)
            except (CoordinationError, NoBrokerError) as error:
                left = left or str(error)
            if self._is_over():
                if is_gone:
                    return
                raise RequestTimeoutError(
                    f"topic '{self._topic}' is marked for deletion, and not deleted"
                    f" yet: {left} (waited {self._waited(since_s)}); the brokers"
                    " continue without this command"
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
    # These statuses are valid for any definition: server.ini overrides each.
    outlasting = {Effect.OVERRIDDEN, Effect.DELETING}
    if status and status.definition != checksum and status.effect not in outlasting:
        status = None
    partitions = _counts(snapshot, topic).get(broker_id)
    is_there = snapshot.leader(broker_id) is not None
    if status and status.effect is Effect.IN_EFFECT and is_there:
        # Puts and gets are registered one after the other; wait until they agree.
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
    """Return a definition after the checks that are possible here.

    Raises:
        ConfigError: brokers would refuse it; only they check schedules.
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
        why = "is of MetaQ 1.4" if missing[0] in java else "is away"
        return NoBrokerError(
            f"broker {missing[0]} cannot serve the topic, because it {why}; brokers"
            f" that can: {_listed(able)}"
        )
    return NoBrokerError(
        "no broker that can serve the topic is present; brokers of MetaQ 1.4, which"
        f" read topics from their server.ini only: {_listed(java)}"
    )


def _require_obeyed(topic: str, found: TopicOnBroker) -> None:
    """Raise if a broker has reported that it does not follow the definition.

    Raises:
        TopicRefusedError: the definition is overridden or refused.
    """
    if found.effect is Effect.OVERRIDDEN:
        raise TopicRefusedError(
            f"topic '{topic}': the section of that name in server.ini of broker"
            f" {found.broker_id} takes precedence: {found.text}"
        )
    if found.effect is Effect.REFUSED:
        raise TopicRefusedError(
            f"broker {found.broker_id} cannot serve the topic as defined:"
            f" {found.text}; use 'metaq topics alter {topic}' or 'metaq topics delete"
            f" {topic}'"
        )


def _has_taken_up(found: TopicOnBroker | None, definition: TopicDefinition) -> bool:
    return (
        found is not None
        and found.effect is Effect.IN_EFFECT
        and (found.partitions == definition.partitions or found.is_hidden)
    )


# -- words ----------------------------------------------------------------------------


def _left(found: TopicDescription) -> str:
    """Return which brokers have not finished a deletion."""
    if not found.brokers:
        return "no broker has it any more"
    each_told = (
        str(each.broker_id)
        + ("" if each.is_there else " (away)")
        + (f" ({each.text})" if each.effect is Effect.DELETING else "")
        for each in found.brokers
    )
    return f"brokers that still have it: {', '.join(each_told)}"


def _whereabouts(found: TopicDescription) -> str:
    """Return in words where an existing topic is defined or served."""
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
    """Return the ids of an argument, ascending; None: all brokers.

    Raises:
        ConfigError: there are none, or a text other than "all".
        TypeError: the argument has a wrong type.
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
