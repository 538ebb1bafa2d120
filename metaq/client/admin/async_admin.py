"""Administration of a cluster from a program: `client.admin()`, async."""

from collections.abc import Mapping
from types import MappingProxyType

from metaq.client.admin import cluster_admin, topic_admin
from metaq.client.admin.cluster_admin import BrokerDescription
from metaq.client.admin.topic_admin import Brokers, TopicDescription
from metaq.client.cluster.context import ClientContext
from metaq.model import BrokerId

NO_SETTINGS: Mapping[str, str] = MappingProxyType({})


class AsyncAdmin:
    """Administration of a cluster. Made by `AsyncClient.admin`; holds nothing.

    Topics need ZooKeeper, and brokers of this package: those of MetaQ 1.4 take topics
    from their `server.ini` alone.
    """

    def __init__(self, context: ClientContext) -> None:
        """Wrap the client's parts; `AsyncClient.admin` is the way in."""
        self._context = context

    async def create_topic(
        self,
        topic: str,
        *,
        partitions: int,
        brokers: Brokers = "all",
        settings: Mapping[str, str] = NO_SETTINGS,
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

        Raises:
            ConfigError: name, number or settings cannot be; or the client has no
                ZooKeeper.
            TopicExistsError: there is one of that name.
            NoBrokerError: no broker that can is there, or not all that are named.
            TopicRefusedError: a broker cannot serve it like that; it is made, and may
                be altered or deleted.
            RequestTimeoutError: not all have it in time; it is made, and they will.
            CoordinationError: ZooKeeper cannot be asked.

        Cancellation: it may be made.
        """
        return await topic_admin.create_topic(
            self._context,
            topic,
            partitions=partitions,
            brokers=brokers,
            settings=settings,
            deadline_s=self._context.deadline_s(timeout),
        )

    async def alter_topic(
        self,
        topic: str,
        *,
        partitions: int | None = None,
        brokers: Brokers | None = None,
        settings: Mapping[str, str] = NO_SETTINGS,
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

        Raises:
            NoTopicError: nothing is known of it.
            ConfigError: fewer partitions than now, or settings that cannot be.
            TopicRefusedError: a broker cannot serve it like that, or goes by its
                `server.ini`; the change is made.
            MetaqError: as `create_topic`.

        Cancellation: it may be altered.
        """
        return await topic_admin.alter_topic(
            self._context,
            topic,
            partitions=partitions,
            brokers=brokers,
            settings=settings,
            deadline_s=self._context.deadline_s(timeout),
        )

    async def delete_topic(self, topic: str, timeout: float | None = None) -> None:
        """Delete a topic, its data and its groups' offsets; wait until it is gone.

        Brokers that are away do their part when they come back; until then the name
        cannot be given to a new topic.

        Args:
            topic: its name.
            timeout: seconds; None takes `request_timeout_s`.

        Raises:
            NoTopicError: nothing is known of it.
            TopicRefusedError: `server.ini` of a broker defines it, or a broker of MetaQ
                1.4 serves it; nothing is done.
            GroupInUseError: a member reads it; nothing is done.
            RequestTimeoutError: some brokers have not done their part in time; they go
                on.
            ConfigError: the client has no ZooKeeper.
            CoordinationError: ZooKeeper cannot be asked.

        Cancellation: it may go on.
        """
        deadline_s = self._context.deadline_s(timeout)
        await topic_admin.delete_topic(self._context, topic, deadline_s=deadline_s)

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
        deadline_s = self._context.deadline_s(timeout)
        return await topic_admin.describe_topic(
            self._context, topic, deadline_s=deadline_s
        )

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
        deadline_s = self._context.deadline_s(timeout)
        return await topic_admin.describe_topics(self._context, deadline_s=deadline_s)

    async def brokers(
        self, timeout: float | None = None
    ) -> tuple[BrokerDescription, ...]:
        """Return the brokers that are there, and those that have left a record.

        Ids ascending; behind them the named addresses that have never answered. A Java
        broker records nothing, so one that is away is not among them. Needs no
        ZooKeeper, which alone knows of brokers that are away.

        Args:
            timeout: seconds; None takes `request_timeout_s`.

        Raises:
            NoBrokerError: nothing is known of the cluster.
            CoordinationError: ZooKeeper cannot be asked.
        """
        deadline_s = self._context.deadline_s(timeout)
        return await cluster_admin.brokers(self._context, deadline_s=deadline_s)

    async def forget_broker(
        self, broker_id: int, timeout: float | None = None
    ) -> BrokerDescription:
        """Delete the records of a broker that is gone for good, and return them.

        From then on nothing says that its partitions are away, and no deletion of a
        topic waits for it. Its data is not touched: if it comes back it
        registers, and is recorded, again.

        Args:
            broker_id: which one.
            timeout: seconds; None takes `request_timeout_s`.

        Raises:
            BrokerRegisteredError: it is there, and would write its record again.
            ClientError: there is no record of it.
            ConfigError: the client has no ZooKeeper.
            CoordinationError: ZooKeeper cannot be asked; some of it may be removed, and
                the same call may be made again.

        Cancellation: some of it may be removed.
        """
        return await cluster_admin.forget_broker(
            self._context,
            BrokerId(broker_id),
            deadline_s=self._context.deadline_s(timeout),
        )
