"""Members that copy a topic exactly once, while members and servers die at any step.

METAQ_KILL_ROUNDS repeats the faults of a run; METAQ_WHOLE=1 has three hundred.
"""

import os
import queue
import random
import signal
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest

from metaq.client import Client, MetaqError, OutgoingMessage
from tests.integration.conftest import ZooKeeperServer
from tests.matrix.exact_member import (
    GROUP,
    SESSION_S,
    SOURCE,
    STEPS,
    TARGET,
    WAIT_S,
    ExactMember,
    copies_of,
)
from tests.matrix.scene import broker_arguments
from tests.rigs.process import BrokerProcess
from tests.rigs.waiting import wait_until
from tests.sampling import IS_WHOLE, SEED

SAMPLE = 6
ROUNDS = int(os.environ.get("METAQ_KILL_ROUNDS", "50" if IS_WHOLE else "1"))
"""Times that a sample of faults is chosen."""
MEMBERS = 2
PARTITIONS = 2
"""Of the input, at each of the brokers."""
BURST = 3
"""Messages for each partition between two looks."""

pytestmark = [
    pytest.mark.crash,
    pytest.mark.slow,
    pytest.mark.zookeeper,
    pytest.mark.timeout(900 + 60 * ROUNDS),
]


class Copying:
    """A cluster under load, and the members that copy."""

    def __init__(
        self, zookeeper: ZooKeeperServer, brokers: list[BrokerProcess], directory: Path
    ) -> None:
        self.zookeeper = zookeeper
        self.brokers = brokers
        self.failures: list[str] = []
        self.members: list[ExactMember] = []
        self._log = directory / "members.log"
        self._joined = 0
        self._client = Client(zookeeper.address, request_timeout_s=5.0)
        self._client.__enter__()
        self._producer = self._client.producer(timeout_s=2.0)
        self._producer.__enter__()

    def fill(self) -> None:
        """Have as many members as there are to be."""
        while len(self.members) < MEMBERS:
            self._joined += 1
            name = f"member-{self._joined}"
            self.members.append(ExactMember(self.zookeeper.address, name, self._log))

    def lose(self, member: ExactMember) -> None:
        """Kill a member."""
        member.kill()
        self.members.remove(member)
        self.failures += member.failures

    def load(self) -> None:
        """Send some more; what does not arrive while a broker is away is not there."""
        messages = [
            OutgoingMessage(b"x", partition=f"{broker}-{number}")
            for broker in range(len(self.brokers))
            for number in range(PARTITIONS)
        ]
        with suppress(MetaqError):
            self._producer.send_many(SOURCE, messages * BURST)

    def pause(self, member: ExactMember, step: str) -> None:
        """Have a member pause at a step, under load."""
        member.ask(f"pause {step}")
        end_s = time.monotonic() + WAIT_S
        while True:
            self.load()
            try:
                assert member.said.get(timeout=0.1) == step
            except queue.Empty:
                assert member.is_running, self.complaints()
                assert time.monotonic() < end_s, (step, self.complaints())
            else:
                return

    def complaints(self) -> str:
        """Return the end of what the members have written."""
        return self._log.read_text()[-3000:]

    def ledger(self) -> tuple[Counter[tuple[int, bytes]], dict[int, list[bytes]]]:
        """Return what is due at each broker, and what is there."""
        due = Counter(
            copy
            for message in self._client.browse(SOURCE)
            for copy in copies_of(message).items()
        )
        found = defaultdict[int, list[bytes]](list)
        for message in self._client.browse(TARGET):
            found[message.partition.broker_id].append(message.data)
        return due, found

    def is_done(self) -> bool:
        """Whether there is as much as is due, at least."""
        with suppress(MetaqError):
            due, found = self.ledger()
            return sum(map(len, found.values())) >= due.total()
        return False

    def check(self) -> int:
        """Compare what is there with what is due; return how much it is."""
        due, found = self.ledger()
        there = Counter((broker, one) for broker in found for one in found[broker])
        assert there == due, (due - there, there - due, self.complaints())
        for broker, copies in found.items():
            last: dict[bytes, int] = {}
            for copy in copies:
                place, _, offset = copy.partition(b" ")
                assert int(offset) > last.get(place, -1), (broker, copy)
                last[place] = int(offset)
        with self._client.xa(f"group-{GROUP}") as xa:
            assert list(xa.recover()) == []
        return due.total()

    def close(self) -> None:
        """End all of it."""
        for member in [*self.members]:
            self.lose(member)
        self._producer.close()
        self._client.close()


# -- faults ----------------------------------------------------------------------------


def kill_member(copying: Copying, member: ExactMember) -> None:
    """It is killed; another one takes its place."""
    copying.lose(member)
    copying.fill()


def stop_member(_copying: Copying, member: ExactMember) -> None:
    """It hangs for longer than its session lives, and goes on then."""
    member.signal(signal.SIGSTOP)
    time.sleep(1.5 * SESSION_S)
    member.signal(signal.SIGCONT)
    member.ask("go")


def kill_broker(copying: Copying, member: ExactMember) -> None:
    """A broker is killed; the member may go on before it is there again."""
    broker = copying.brokers[len(member.name) % 2]
    broker.kill()
    member.ask("go")
    broker.start()


def restart_zookeeper(copying: Copying, member: ExactMember) -> None:
    """ZooKeeper is killed; the member goes on, and finds it away."""
    copying.zookeeper.kill()
    member.ask("go")
    copying.zookeeper.start()


def kill_all(copying: Copying, member: ExactMember) -> None:
    """The member dies with the broker that holds its branch."""
    copying.brokers[0].kill()
    copying.lose(member)
    copying.brokers[0].start()
    copying.fill()


Fault = Callable[[Copying, ExactMember], None]
FAULTS: dict[Fault, int] = {
    kill_member: 8,
    stop_member: 4,
    kill_broker: 4,
    restart_zookeeper: 2,
    kill_all: 2,
}
"""Fault → how often it is chosen."""


@pytest.fixture
def copying(zookeeper_alone: ZooKeeperServer, tmp_path: Path) -> Iterator[Copying]:
    topics = {SOURCE: PARTITIONS, TARGET: 1}
    with ExitStack() as stack:
        brokers = [
            stack.enter_context(
                BrokerProcess(
                    tmp_path / f"broker-{number}",
                    topic=SOURCE,
                    more_topics=[TARGET],
                    arguments=broker_arguments(zookeeper_alone.address, number, topics),
                )
            )
            for number in range(2)
        ]
        one = Copying(zookeeper_alone, brokers, tmp_path)
        stack.callback(one.close)
        yield one


def test_whatever_dies_each_input_is_copied_once_and_in_order(copying: Copying) -> None:
    """A fault at a step of a batch, again and again, under load."""
    rng = random.Random(SEED)
    copying.fill()
    history = []
    for number in range(SAMPLE * ROUNDS):
        began_s = time.monotonic()
        (fault,) = rng.sample([*FAULTS], 1, counts=[*FAULTS.values()])
        step, member = rng.choice(STEPS), rng.choice(copying.members)
        if step.endswith("token"):
            # A member makes one when its first batch begins.
            kill_member(copying, member)
            member = copying.members[-1]
        copying.pause(member, step)
        fault(copying, member)
        history.append(f"{fault.__name__} {step}")
        print(f"{number}: {history[-1]}: {time.monotonic() - began_s:.1f} s")
    wait_until(copying.is_done, WAIT_S, copying.complaints)
    for member in [*copying.members]:
        assert member.leave() == 0, copying.complaints()
        copying.failures += member.failures
    copying.members.clear()
    assert copying.failures == [], history
    print(f"{copying.check()} copies, {len(history)} faults")
