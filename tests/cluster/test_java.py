"""MetaQ's own Java client, unmodified, while the leader of a replica set changes."""

import threading
import time
from collections import Counter
from collections.abc import Iterator
from itertools import count, pairwise
from pathlib import Path

import pytest
from py4j.protocol import Py4JJavaError

from metaq.errors import MetaqError
from tests.cluster.failovers import COUNT, failover, faults
from tests.cluster.ledger import SEND_S
from tests.cluster.rig import BROKER_ID, SETTLE_S, TOPIC, Cluster
from tests.java.client import JavaClient, outcome_of
from tests.java.conftest import plain_py4j
from tests.java.group_members import Book, JavaMember
from tests.java.jvm import Jvm
from tests.rigs.waiting import wait_until
from tests.sampling import IS_WHOLE

__all__ = ["plain_py4j"]

pytestmark = [
    pytest.mark.skipif(not IS_WHOLE, reason="minutes: with METAQ_WHOLE"),
    pytest.mark.crash,
    pytest.mark.java,
    pytest.mark.slow,
    pytest.mark.zookeeper,
    pytest.mark.timeout(900 + 60 * COUNT),
    # Of Py4J, which leaves them to the garbage.
    pytest.mark.filterwarnings("ignore:unclosed <socket"),
    pytest.mark.filterwarnings("ignore:.*<socket.socket fd="),
]

MORE = 30
"""Messages of each sender that show that it goes on."""
NOT_STORED = (
    "[not-leader]",
    "[too-few-replicas]",
    "There is no aviable partition",
    "There is no aviable server",
    "无可用连接",  # there is no connection
)
"""In what Java says of a message that was not stored. Of one that may be stored it says
that it waited for the answer in vain."""


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    with Cluster(tmp_path / "cluster") as one:
        yield one


class Sender(threading.Thread):
    """Sends one message after the other, each until it is acknowledged."""

    def __init__(self, name: str) -> None:
        super().__init__(name=name, daemon=True)
        self.acked: dict[tuple[str, int], bytes] = {}
        self.acked_s: list[float] = []
        self.failed: list[tuple[float, bytes, str]] = []
        self.is_ending = threading.Event()
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            for number in count():
                if self.is_ending.wait(0.005):
                    return
                data = f"{self.name}:{number}".encode()
                while (why := self.send(data)) is not None:
                    self.failed.append((time.monotonic(), data, why))
                    time.sleep(0.05)
                self.acked_s.append(time.monotonic())
        except BaseException as error:
            self.error = error

    def send(self, data: bytes) -> str | None:
        """Send once; return why it failed."""
        raise NotImplementedError

    def end(self) -> None:
        self.is_ending.set()
        self.join(SETTLE_S)
        assert not self.is_alive(), f"{self.name} does not end"
        assert self.error is None, self.error


class JavaSender(Sender):
    """A producer of a session factory of its own, with Java's own time-outs."""

    def __init__(self, jvm: Jvm, zookeeper: str, name: str) -> None:
        super().__init__(name)
        self._client = JavaClient(jvm, zookeeper)
        self._producer = self._client.producer(TOPIC)

    def send(self, data: bytes) -> str | None:
        try:
            result = self._producer.sendMessage(self._client.message(TOPIC, data))
        except Py4JJavaError as error:
            return str(error.java_exception.toString())
        outcome = outcome_of(result)
        if not outcome.is_success:
            return f"not stored: {outcome.error}"
        assert outcome.partition is not None
        self.acked[outcome.partition, outcome.offset] = data
        return None

    def end(self) -> None:
        super().end()
        self._client.factory.shutdown()


class OurSender(Sender):
    """A producer of ours, which is to fail never."""

    def __init__(self, cluster: Cluster, name: str) -> None:
        super().__init__(name)
        self._client = cluster.client()
        self._client.start()
        self._producer = self._client.producer(timeout_s=SEND_S)

    def send(self, data: bytes) -> str | None:
        try:
            result = self._producer.send(TOPIC, data)
        except MetaqError as error:
            return repr(error)
        self.acked[result.partition.name, result.offset] = data
        return None

    def end(self) -> None:
        super().end()
        self._client.close()


class Load:
    """Senders, a group of two Java consumers, and their accounts."""

    def __init__(self, jvm: Jvm, cluster: Cluster) -> None:
        self.cluster = cluster
        zookeeper = cluster.zookeeper.address
        self.book = Book()
        self.members = [
            JavaMember(jvm, zookeeper, name, TOPIC, "DEFAULT", self.book)
            for name in ("member-1", "member-2")
        ]
        self.java = [JavaSender(jvm, zookeeper, f"java-{n}") for n in (1, 2)]
        self.ours = OurSender(cluster, "ours")
        self.senders: list[Sender] = [*self.java, self.ours]
        for sender in self.senders:
            sender.start()
        self.wait_more()

    def wait_more(self) -> None:
        """Wait until each sender goes on, and what it sent is consumed."""
        before = {sender: len(sender.acked) for sender in self.senders}
        rows = len(self.book.rows)
        wait_until(
            lambda: (
                all(len(s.acked) > n + MORE for s, n in before.items())
                and len(self.book.rows) > rows + MORE
            ),
            SETTLE_S,
            self.describe,
        )

    def describe(self) -> str:
        counts = {s.name: (len(s.acked), s.failed[-3:]) for s in self.senders}
        return f"{counts}, {len(self.book.rows)} rows\n{self.cluster.describe()}"

    def end(self) -> set[bytes]:
        """Let all come to their end, and compare the accounts with the copies.

        Returns:
            What is in the logs more than once.
        """
        for sender in self.senders:
            sender.end()
        acked = {data for sender in self.senders for data in sender.acked.values()}
        wait_until(lambda: acked <= self.book.data(), SETTLE_S, self.describe)
        for member in self.members:
            member.leave()
        self.cluster.wait_whole()
        self.cluster.stop()
        first, *others = self.cluster.replicas.values()
        for other in others:
            assert other.files() == first.files(), (first.number, other.number)
        copy = {
            f"{BROKER_ID}-{number}": log for number, log in first.read_log().items()
        }
        doubles = self.check(copy)
        print(
            f"{len(acked)} acknowledged, {len(self.book.rows)} deliveries,"
            f" {len(self.in_doubt())} in doubt once, {len(doubles)} stored twice",
            flush=True,
        )
        return doubles

    def check(self, copy: dict[str, dict[int, bytes]]) -> set[bytes]:
        """Compare the accounts with a copy; return what is there more than once."""
        for sender in self.senders:
            for (name, offset), data in sender.acked.items():
                assert copy[name].get(offset) == data, (name, offset, data)
        for name, log in copy.items():
            for sender in self.senders:
                mark = f"{sender.name}:".encode()
                numbers = [
                    int(data.removeprefix(mark))
                    for _offset, data in sorted(log.items())
                    if data.startswith(mark)
                ]
                assert all(a <= b for a, b in pairwise(numbers)), (name, sender.name)
        there = Counter(data for log in copy.values() for data in log.values())
        assert self.book.data() <= there.keys()
        assert self.book.is_in_order()
        assert self.ours.failed == []
        return {data for data, number in there.items() if number > 1}

    def in_doubt(self) -> set[bytes]:
        """Return what Java sent again although it may have been stored."""
        return {
            data
            for sender in self.java
            for _s, data, why in sender.failed
            if not any(text in why for text in NOT_STORED)
        }


def test_java_clients_go_on_after_each_failover(jvm: Jvm, cluster: Cluster) -> None:
    """Nothing acknowledged is lost, order holds, and doubles are of sends in doubt."""
    load = Load(jvm, cluster)
    for fault in faults():
        begin_s = time.monotonic()
        with failover(cluster, fault):
            led_s, rows = time.monotonic(), len(load.book.rows)
            wait_until(lambda rows=rows: len(load.book.rows) > rows, SETTLE_S)
            read_s = time.monotonic()
            load.wait_more()
        report(load, f"{fault}: consumed {read_s - begin_s:.1f} s later", begin_s)
        print(f"another led {led_s - begin_s:.1f} s later", flush=True)
    doubles = load.end()
    assert doubles <= load.in_doubt()


def report(load: Load, what: str, begin_s: float) -> None:
    """Print for how long nothing was acknowledged since something was done."""
    words = [f"{what}; paused:"]
    for sender in load.senders:
        times = [s for s in sender.acked_s if s > begin_s - 1]
        pause_s = max(b - a for a, b in pairwise(times))
        failed = Counter(why for s, _d, why in sender.failed if s > begin_s)
        words.append(f"{sender.name} {pause_s:.1f} s {dict(failed)}")
    print(" ".join(words), flush=True)


def test_a_rolling_restart_loses_and_doubles_nothing(
    jvm: Jvm, cluster: Cluster
) -> None:
    """Each replica in turn: what Java has to send again is not stored before."""
    load = Load(jvm, cluster)
    for number in cluster.replicas:
        begin_s = time.monotonic()
        cluster.replicas[number].ask_to_end()
        assert cluster.replicas[number].wait() == 0
        load.wait_more()
        cluster.mend()
        report(load, f"restart {number}", begin_s)
    assert load.end() == set()
