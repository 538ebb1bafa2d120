"""Members of one group, Java's and ours, which enter what they get into one book."""

import threading
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

from metaq.client import Client
from tests.java.client import SESSION_TIMEOUT_MS, JavaClient, Listener
from tests.java.jvm import Jvm

LEAVE_TIMEOUT_S = 40.0


class Row(NamedTuple):
    """One delivery."""

    member: str
    partition: str
    id: int
    data: bytes


class Book:
    """Every delivery, in the order in which they happened."""

    def __init__(self) -> None:
        self.rows: list[Row] = []

    def data(self) -> set[bytes]:
        return {row.data for row in self.rows}

    def repeats(self) -> list[tuple[str, Row]]:
        """Return what came again, each with the member that had it first."""
        first: dict[tuple[str, int], str] = {}
        found = []
        for row in self.rows:
            place = (row.partition, row.id)
            if place in first:
                found.append((first[place], row))
            first.setdefault(place, row.member)
        return found

    def is_in_order(self) -> bool:
        """Whether what was new in each partition came in the order of the log."""
        new = {(row.partition, row.id): None for row in self.rows}
        ids: dict[str, list[int]] = {}
        for partition, number in new:
            ids.setdefault(partition, []).append(number)
        return all(numbers == sorted(numbers) for numbers in ids.values())


class Member(Protocol):
    """Either kind."""

    def leave(self) -> None: ...


class _Entering(Listener):
    def __init__(self, name: str, book: Book) -> None:
        super().__init__()
        self._name = name
        self._book = book

    def recieveMessages(self, message: Any) -> None:
        where = message.getPartition().toString()
        data = bytes(message.getData())
        self._book.rows.append(Row(self._name, where, message.getId(), data))


class JavaMember:
    """A session factory and a consumer of its own."""

    def __init__(
        self,
        jvm: Jvm,
        zookeeper: str,
        name: str,
        topic: str,
        strategy: str,
        book: Book,
        *,
        session_timeout_ms: int = SESSION_TIMEOUT_MS,
    ) -> None:
        self._client = JavaClient(jvm, zookeeper, session_timeout_ms=session_timeout_ms)
        self._consumer = self._client.consumer(
            topic,
            topic,
            _Entering(name, book),
            strategy=strategy,
            ConsumerId=name,
        )

    def leave(self) -> None:
        self._consumer.shutdown()
        self._client.factory.shutdown()


class OurMember(threading.Thread):
    """A client and a consumer of its own, on a thread that reads until it is to go."""

    def __init__(
        self, zookeeper: str, name: str, topic: str, strategy: str, book: Book
    ) -> None:
        super().__init__(name=name, daemon=True)
        self._zookeeper = zookeeper
        self._topic = topic
        self._strategy = strategy
        self._book = book
        self._leaving = threading.Event()
        self._error: BaseException | None = None
        self.start()

    def run(self) -> None:
        try:
            with (
                Client(self._zookeeper) as client,
                client.consumer(
                    self._topic,
                    [self._topic],
                    consumer_id=self.name,
                    strategy=self._strategy,
                    commit_interval_s=0.5,
                    start="earliest",
                ) as consumer,
            ):
                while not self._leaving.is_set():
                    for one in consumer.receive_many(50, timeout=0.1):
                        where = one.partition.name
                        self._book.rows.append(Row(self.name, where, one.id, one.data))
        except BaseException as error:
            self._error = error

    def leave(self) -> None:
        self._leaving.set()
        self.join(LEAVE_TIMEOUT_S)
        assert not self.is_alive(), f"{self.name} does not leave"
        assert self._error is None, self._error


class Senders:
    """A Java producer and one of ours that send until told to stop."""

    def __init__(self, java: JavaClient, ours: Client, topic: str) -> None:
        self.acked: set[bytes] = set()
        self._errors: list[BaseException] = []
        self._ending = threading.Event()
        producer = java.producer(topic)
        own = ours.producer(timeout_s=LEAVE_TIMEOUT_S)

        def send_java(number: int) -> None:
            data = b"java %d" % number
            if java.send(producer, topic, data).is_success:
                self.acked.add(data)

        def send_ours(number: int) -> None:
            batch = [b"ours %d %d" % (number, n) for n in range(5)]
            own.send_many(topic, batch)
            self.acked.update(batch)

        self._threads = [
            threading.Thread(target=self._run, args=(send,), daemon=True)
            for send in (send_java, send_ours)
        ]
        for thread in self._threads:
            thread.start()

    def _run(self, send: Callable[[int], None]) -> None:
        number = 0
        try:
            while not self._ending.wait(0.01):
                send(number)
                number += 1
        except BaseException as error:
            self._errors.append(error)

    def stop(self) -> None:
        self._ending.set()
        for thread in self._threads:
            thread.join(LEAVE_TIMEOUT_S)
            assert not thread.is_alive(), "a sender does not end"
        assert self._errors == []
