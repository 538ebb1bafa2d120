"""MetaQ's Java client, as tests use it: factories, producers, listeners, consumers.

A listener here is Python that Java calls on its own threads.
"""

import threading
from collections.abc import Callable
from types import TracebackType
from typing import Any, NamedTuple, Self

from tests.java.jvm import Jvm

ROOT = "/meta"
SESSION_TIMEOUT_MS = 4_000
CONNECTION_TIMEOUT_MS = 20_000
SYNC_MS = 1_000
"""Pause between Java's attempts to rebalance; 5 s unless told. It gives up after seven
of them, and a busy machine has to let others release within."""
SEND_TIMEOUT_MS = 20_000
MAX_SIZE = 1 << 20


class Received(NamedTuple):
    """Messages given to a listener."""

    data: bytes
    attribute: str | None
    partition: str
    id: int


class Outcome(NamedTuple):
    """Fields of Java's SendResult."""

    is_success: bool
    error: str | None
    partition: str | None
    offset: int


def outcome_of(result: Any) -> Outcome:
    partition = result.getPartition()
    return Outcome(
        result.isSuccess(),
        result.getErrorMessage(),
        None if partition is None else partition.toString(),
        result.getOffset(),
    )


class Listener:
    """Collects what Java hands it; `fail` decides which deliveries raise."""

    def __init__(self, fail: Callable[[Received], bool] = lambda _one: False) -> None:
        self.received: list[Received] = []
        self.executor: Any = None
        self._fail = fail

    def recieveMessages(self, message: Any) -> None:
        one = Received(
            bytes(message.getData()),
            message.getAttribute(),
            message.getPartition().toString(),
            message.getId(),
        )
        self.received.append(one)
        if self._fail(one):
            raise ValueError("not now")

    def getExecutor(self) -> Any:
        return self.executor

    @property
    def data(self) -> list[bytes]:
        return [one.data for one in self.received]

    class Java:
        implements = ("com.taobao.metamorphosis.client.consumer.MessageListener",)


class Callback:
    """Waits for the outcome of one asynchronous send."""

    def __init__(self) -> None:
        self._outcome: Outcome | str = ""
        self._is_done = threading.Event()

    def onMessageSent(self, result: Any) -> None:
        self._outcome = outcome_of(result)
        self._is_done.set()

    def onException(self, error: Any) -> None:
        self._outcome = error.toString()
        self._is_done.set()

    def wait(self) -> Outcome | str:
        """Wait for it; return the result, or the text of Java's exception."""
        assert self._is_done.wait(SEND_TIMEOUT_MS / 1000)
        return self._outcome

    class Java:
        implements = ("com.taobao.metamorphosis.client.producer.SendMessageCallback",)


class JavaClient:
    """One session factory and what was made by it. Lifecycle: a context manager."""

    def __init__(
        self,
        jvm: Jvm,
        zookeeper: str,
        factory: str | None = None,
        *,
        session_timeout_ms: int = SESSION_TIMEOUT_MS,
    ) -> None:
        self.jvm = jvm
        config = jvm.metaq.client.MetaClientConfig()
        config.setZkConfig(
            jvm.metaq.utils.ZkUtils.ZKConfig(
                ROOT,
                zookeeper,
                session_timeout_ms,
                CONNECTION_TIMEOUT_MS,
                SYNC_MS,
                True,
            )
        )
        if factory is None:
            self.factory = jvm.metaq.client.MetaMessageSessionFactory(config)
        else:
            made = jvm.package(f"com.taobao.metamorphosis.client.{factory}")
            self.factory = made(config)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        _kind: type[BaseException] | None,
        _error: BaseException | None,
        _trace: TracebackType | None,
    ) -> None:
        self.factory.shutdown()

    def producer(self, *topics: str) -> Any:
        """Return a producer that has published these topics."""
        producer = self.factory.createProducer()
        for topic in topics:
            producer.publish(topic)
        return producer

    def message(self, topic: str, data: bytes, attribute: str | None = None) -> Any:
        if attribute is None:
            return self.jvm.metaq.Message(topic, data)
        return self.jvm.metaq.Message(topic, data, attribute)

    def send(
        self, producer: Any, topic: str, data: bytes, attribute: str | None = None
    ) -> Outcome:
        """Send one message and wait.

        Raises:
            Py4JJavaError: what Java raised.
        """
        result = producer.sendMessage(
            self.message(topic, data, attribute),
            SEND_TIMEOUT_MS,
            self.jvm.package("java.util.concurrent").TimeUnit.MILLISECONDS,
        )
        return outcome_of(result)

    def put(self, topic: str, *data: bytes) -> None:
        """Send messages one after the other; each must be stored."""
        producer = self.producer(topic)
        for one in data:
            outcome = self.send(producer, topic, one)
            assert outcome.is_success, outcome.error
        producer.shutdown()

    def consumer(
        self,
        group: str,
        topic: str,
        listener: Listener,
        *,
        max_size: int = MAX_SIZE,
        strategy: str = "DEFAULT",
        filter_: Any = None,
        storage: Any = None,
        **settings: Any,
    ) -> Any:
        """Subscribe to a topic, wait until Java says that it is done.

        Args:
            settings: of Java's ConsumerConfig: `MaxFetchRetries=1`.
        """
        config = self.jvm.metaq.client.consumer.ConsumerConfig(group)
        config.setMaxDelayFetchTimeInMills(500)
        config.setCommitOffsetPeriodInMills(500)
        kinds = getattr(self.jvm.metaq.client.consumer, "LoadBalanceStrategy$Type")
        config.setLoadBalanceStrategyType(getattr(kinds, strategy))
        for name, value in settings.items():
            getattr(config, f"set{name}")(value)
        if storage is None:
            consumer = self.factory.createConsumer(config)
        else:
            consumer = self.factory.createConsumer(config, storage)
        if filter_ is None:
            consumer.subscribe(topic, max_size, listener)
        else:
            consumer.subscribe(topic, max_size, listener, filter_)
        consumer.completeSubscribe()
        return consumer
