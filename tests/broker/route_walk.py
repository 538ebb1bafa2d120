"""A random machine over puts to an exchange, and a book that says what is where.

Each step binds, unbinds, sends some batches at once, sends unanswered ones again, sends
in a transaction, closes a partition, fills the disk, or kills the broker, which may
come within any other step, at one of its syncs. After each step the topics are compared
with the book: a message is in a topic once at most, and only where a binding of that
moment sent it; one that was answered is in each topic that it was bound to whenever it
was sent; one that was refused is nowhere; batches of a producer are in their order in
each partition.
"""

import random
from dataclasses import dataclass, field, replace
from typing import Any

from metaq.protocol.commands import Mput, Result
from metaq.routing.match import Binding, words_of
from tests.broker.delay_rig import FakeSession, result_of
from tests.broker.route_rig import TOPICS, RouteRig, batch_of
from tests.broker.stepped import cut_at_sync
from tests.rigs.disk import CAPACITY_BYTES
from tests.rigs.fs import FaultyFileSystem, keep_all, keep_random
from tests.routing.test_match import fits

PATTERNS = ("#", "a.#", "*.b", "a.b", "b.*", "#.c")
KEYS = ("a.b", "a", "b.b", "c", "a.c", "")
MESSAGE_KEYS = (None, None, "k1", "k2")
BOUND = ("t0", "t1", "t2")


@dataclass
class Sent:
    """One batch, as its sender knows it."""

    command: Mput
    datas: list[tuple[bytes, str]]
    """Data and routing key of each message."""
    routes: list[dict[bytes, set[str]]] = field(default_factory=list)
    """Of each time that it was sent: data → topics that it was bound to."""
    outcome: str = "unknown"
    """`stored`, `refused` where it is nowhere, or unknown."""


@dataclass
class Book:
    """Batches that were sent, and the bindings that are in effect."""

    bindings: set[Binding] = field(default_factory=set)
    sent: list[Sent] = field(default_factory=list)
    unanswered: list[Sent] = field(default_factory=list)
    """Those that may be sent again."""


class RouteWalk:
    """The machine. One walk is one seed."""

    def __init__(self, seed: int, make: type[RouteRig] = RouteRig) -> None:
        self.random = random.Random(seed)
        self.make = make
        self.book = Book()
        self.rig = make()
        self.numbers = iter(range(10**9))
        self.sequence = 0
        self.counts: dict[str, int] = {}

    def play(self, steps: int) -> None:
        """Take so many steps, and see that all is where it should be."""
        for _ in range(steps):
            step = self.random.choice(self.steps())
            self.counts[step.__name__] = self.counts.get(step.__name__, 0) + 1
            if self.random.random() < 0.15:
                self._play_cut(step)
            else:
                step()
            self.check()
        self.rig.bench.kill()

    def steps(self) -> list[Any]:
        return [
            *[self.bind] * 3,
            *[self.send] * 6,
            *[self.send_again] * 2,
            self.send_in_transaction,
            self.close,
            self.fill_disk,
            self.kill,
        ]

    # -- steps

    def bind(self) -> None:
        binding = Binding(self.random.choice(BOUND), self.random.choice(PATTERNS))
        self.book.bindings ^= {binding}
        self.rig.bind(*self.book.bindings)

    def send(self) -> None:
        """Send batches at once, as a producer has several in flight."""
        self._send([self._batch() for _ in range(self.random.choice((1, 1, 3)))])

    def send_again(self) -> None:
        """Send what has no answer again, in its order."""
        self._send(self.book.unanswered)

    def send_in_transaction(self) -> None:
        sent = self._batch()
        sent.command = replace(sent.command, producer=None, sequence=-1)
        self._note(sent)
        if self.rig.commit(sent.command):
            sent.outcome = "stored"

    def close(self) -> None:
        topic = self.random.choice(BOUND)
        topics = self.rig.context.topics
        if topics.is_closed(topic, 0):
            topics.open_partitions(topic)
        else:
            topics.close_partitions(topic, start=0, end=0)

    def fill_disk(self) -> None:
        """Have the disk full for the time of a send."""
        self.rig.fs.set_capacity(
            self.rig.fs.used_bytes() + self.random.choice((0, 300))
        )
        self.send()
        self.rig.fs.set_capacity(CAPACITY_BYTES)

    def kill(self) -> None:
        self._begin_again(self.rig.fs.snapshot(), self.book)

    # -- the end of a life

    def _play_cut(self, step: Any) -> None:
        """Take a step in which the process ends, or the power goes, at a sync."""
        fs, number = self.rig.fs, self.random.randrange(6)
        with cut_at_sync(fs, number, lambda: self.book) as found:
            step()
        if self.rig.fs is fs:
            self._begin_again(*found[0])

    def _begin_again(self, fs: FaultyFileSystem, book: Book) -> None:
        self.rig.bench.kill()
        self.book = book
        if self.random.random() < 0.7:
            fs = fs.crash(keep_all)  # the process was killed, the machine goes on
        else:
            # Which batches there were is not synced with them (decision 0010).
            book.unanswered.clear()
            fs = fs.crash(keep_random(self.random.randrange(1 << 30)))
        fs.set_capacity(CAPACITY_BYTES)
        self.rig = self.make(*book.bindings, fs=fs, clock=self.rig.clock)

    # -- the book

    def _batch(self) -> Sent:
        datas, messages = [], []
        for _ in range(self.random.choice((1, 1, 2, 6))):
            routing_key = self.random.choice(KEYS)
            data = b"|%d" % next(self.numbers)
            key = self.random.choice(MESSAGE_KEYS)
            datas.append((data, routing_key))
            messages.append(
                (routing_key, data) if key is None else (routing_key, data, key)
            )
        command = batch_of(
            *messages,
            producer="p",
            sequence=self.sequence,
            is_mandatory=self.random.choice((True, False, None)),
        )
        self.sequence += len(datas)
        return Sent(command, datas)

    def _note(self, sent: Sent) -> None:
        """Note that a batch is sent now."""
        if not sent.routes:
            self.book.sent.append(sent)
        sent.routes.append({d: self._topics_of(key) for d, key in sent.datas})

    def _topics_of(self, routing_key: str) -> set[str]:
        words = words_of(routing_key)
        return {
            each.topic for each in self.book.bindings if fits(words_of(each.key), words)
        }

    def _send(self, batches: list[Sent]) -> None:
        begun: list[tuple[Sent, FakeSession]] = []
        self.book.unanswered = [*batches]
        for sent in batches:
            self._note(sent)
            begun.append((sent, self.rig.begin(sent.command)))
        self.rig.bench.run()
        left = []
        for sent, session in begun:
            sent.outcome = self._outcome_of(sent, result_of(session.replies[0]))
            if sent.outcome == "unknown":
                left.append(sent)
        self.book.unanswered = left

    @staticmethod
    def _outcome_of(sent: Sent, reply: Result) -> str:
        if reply.status == 200:
            return "stored"
        if len(sent.routes) > 1 or "[in-doubt]" in reply.text:
            return "unknown"
        return "refused"

    # -- the check

    def check(self) -> None:
        """Compare all topics with the book."""
        places: dict[str, list[list[bytes]]] = {
            topic: [self.rig.payloads(topic, p) for p in range(count)]
            for topic, count in TOPICS.items()
        }
        order = {
            data: number
            for number, sent in enumerate(self.book.sent)
            for data, _ in sent.datas
            if sent.command.producer is not None
        }
        has = {t: [d for part in parts for d in part] for t, parts in places.items()}
        for topic, datas in has.items():
            assert len(datas) == len(set(datas)), f"{topic} has a message twice"
        for sent in self.book.sent:
            for data, _ in sent.datas:
                there = {topic for topic, datas in has.items() if data in datas}
                routes = [each[data] for each in sent.routes]
                assert there <= set.union(*routes), f"{data!r}: {there} not {routes}"
                if sent.outcome == "stored":
                    assert there >= set.intersection(*routes), f"{data!r}: {there}"
                if sent.outcome == "refused":
                    assert not there, f"{data!r} was refused, and is in {there}"
        for parts in places.values():
            for part in parts:
                numbers = [order[data] for data in part if data in order]
                assert numbers == sorted(numbers), f"order: {part}"
