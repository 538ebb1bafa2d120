"""Administration of a cluster from a program: `client.admin()`, sync."""

from collections.abc import Mapping

from metaq.client.admin.async_admin import NO_SETTINGS, AsyncAdmin
from metaq.client.admin.cluster_admin import BrokerDescription
from metaq.client.admin.topic_admin import Brokers, TopicDescription
from metaq.loop_thread import LoopThread


class Admin:
    """Administration of a cluster, for any thread; see `AsyncAdmin`."""

    def __init__(self, twin: AsyncAdmin, thread: LoopThread) -> None:
        """Wrap the async twin; `Client.admin` is the way in."""
        self._twin = twin
        self._thread = thread

    def create_topic(
        self,
        topic: str,
        *,
        partitions: int,
        brokers: Brokers = "all",
        settings: Mapping[str, str] = NO_SETTINGS,
        timeout: float | None = None,
    ) -> TopicDescription:
        """Make a topic, and wait until it is served; see `AsyncAdmin.create_topic`."""
        return self._thread.run(
            self._twin.create_topic(
                topic,
                partitions=partitions,
                brokers=brokers,
                settings=settings,
                timeout=timeout,
            )
        )

    def alter_topic(
        self,
        topic: str,
        *,
        partitions: int | None = None,
        brokers: Brokers | None = None,
        settings: Mapping[str, str] = NO_SETTINGS,
        timeout: float | None = None,
    ) -> TopicDescription:
        """Change a topic, and wait until it is so; see `AsyncAdmin.alter_topic`."""
        return self._thread.run(
            self._twin.alter_topic(
                topic,
                partitions=partitions,
                brokers=brokers,
                settings=settings,
                timeout=timeout,
            )
        )

    def delete_topic(self, topic: str, timeout: float | None = None) -> None:
        """Delete a topic, its data and offsets; see `AsyncAdmin.delete_topic`."""
        self._thread.run(self._twin.delete_topic(topic, timeout))

    def describe_topic(
        self, topic: str, timeout: float | None = None
    ) -> TopicDescription:
        """Return a description of a topic; see `AsyncAdmin.describe_topic`."""
        return self._thread.run(self._twin.describe_topic(topic, timeout))

    def topics(self, timeout: float | None = None) -> tuple[TopicDescription, ...]:
        """Return a description of every topic; see `AsyncAdmin.topics`."""
        return self._thread.run(self._twin.topics(timeout))

    def brokers(self, timeout: float | None = None) -> tuple[BrokerDescription, ...]:
        """Return the brokers, missing ones too; see `AsyncAdmin.brokers`."""
        return self._thread.run(self._twin.brokers(timeout))

    def forget_broker(
        self, broker_id: int, timeout: float | None = None
    ) -> BrokerDescription:
        """Forget a broker that is gone for good; see `AsyncAdmin.forget_broker`."""
        return self._thread.run(self._twin.forget_broker(broker_id, timeout))
