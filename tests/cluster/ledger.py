"""Promises made to producers, messages given to consumers, and what may not happen.

* what was acknowledged is in every copy, at its offset, once
* messages of one sender to one partition are in the order in which they were sent, also
  where several requests are in flight and some are refused
* what a consumer was given is in every copy at its offset, in order, and nothing that
  was acknowledged is missing there
* at the end all copies are equal, byte for byte
"""

import json
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import count, pairwise
from pathlib import Path
from typing import Any

from metaq.client import Client
from metaq.client.produce.batches import SendFuture
from metaq.errors import MetaqError
from metaq.model import Message
from tests.cluster.rig import SETTLE_S, TOPIC, Cluster
from tests.rigs.waiting import wait_until

SEND_S = 60.0
"""Deadline of a send: longer than any fault."""
PIPELINED = "pipelined"
"""The sender that has several requests in flight."""
Place = tuple[int, int]
"""Partition and offset."""


@dataclass
class Ledger:
    """The accounts of one run."""

    tried: dict[str, list[bytes]] = field(default_factory=lambda: defaultdict(list))
    """Sender → payloads in the order of its sends."""
    acked: dict[Place, bytes] = field(default_factory=dict)
    acked_s: list[float] = field(default_factory=list)
    """Monotonic times of acknowledgements."""
    failed: list[tuple[bytes, str]] = field(default_factory=list)
    given: list[tuple[Place, bytes]] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)
    """Acts on the set, for people."""

    def note(self, fault: str) -> None:
        """Enter something that was done to the set."""
        self.faults.append(f"{time.monotonic():.3f} {fault}")

    def ack(self, data: bytes, result: object) -> None:
        """Enter what was acknowledged."""
        place = (result.partition.partition, result.offset)  # type: ignore[attr-defined]
        assert self.acked.setdefault(place, data) == data, f"two messages at {place}"
        self.acked_s.append(time.monotonic())

    def give(self, message: Message) -> None:
        """Enter what a consumer was given."""
        place = (message.partition.partition, message.offset)
        self.given.append((place, message.data))

    def lost(self, found: Mapping[Place, bytes]) -> list[Place]:
        """Return where something was acknowledged, and something else was found."""
        return [place for place, data in self.acked.items() if found.get(place) != data]

    def violations(self, copy: dict[int, dict[int, bytes]]) -> list[str]:
        """Return what is wrong, by one copy of the logs."""
        there = {(p, offset): d for p, log in copy.items() for offset, d in log.items()}
        found = [
            f"acknowledged and not there: {place} {self.acked[place][:40]!r}"
            for place in self.lost(there)
        ]
        given = dict(self.given)
        found += [
            f"given and not there: {place} {data[:40]!r}"
            for place, data in self.given
            if there.get(place) != data
        ]
        found += [
            f"acknowledged and not given: {place} {data[:40]!r}"
            for place, data in self.acked.items()
            if given.get(place) != data
        ]
        counts = Counter(there.values())
        found += [f"{n} times there: {d[:40]!r}" for d, n in counts.items() if n > 1]
        for sender, payloads in self.tried.items():
            order = {data: number for number, data in enumerate(payloads)}
            for partition, log in copy.items():
                numbers = [order[d] for _o, d in sorted(log.items()) if d in order]
                found += [
                    f"{sender}, partition {partition}: {b} before {a}"
                    for a, b in pairwise(numbers)
                    if a > b
                ]
        return found

    def write(self, path: Path) -> None:
        """Write the history down, one JSON value a line."""
        with path.open("w") as file:
            for line in self.faults:
                file.write(json.dumps({"fault": line}) + "\n")
            for (place, data), now_s in zip(
                self.acked.items(), self.acked_s, strict=False
            ):
                line = {"acked": place, "data": repr(data[:40]), "at": f"{now_s:.3f}"}
                file.write(json.dumps(line) + "\n")
            for data, error in self.failed:
                file.write(json.dumps({"failed": repr(data[:40]), "why": error}) + "\n")
            for place, data in self.given:
                file.write(json.dumps({"given": place, "data": repr(data[:40])}) + "\n")


def _send_each(
    client: Client, name: str, ledger: Ledger, is_over: threading.Event
) -> None:
    """Send one message after the other."""
    with client.producer(timeout_s=SEND_S) as producer:
        for number in count():
            if is_over.is_set():
                return
            data = f"{name}:{number}:".encode() + b"x" * (number % 200)
            ledger.tried[name].append(data)
            try:
                ledger.ack(data, producer.send(TOPIC, data))
            except MetaqError as error:
                ledger.failed.append((data, str(error)))
            time.sleep(0.002)


def _send_nowait(
    client: Client, name: str, ledger: Ledger, is_over: threading.Event
) -> None:
    """Send on while answers are on their way; batches form."""
    sent: list[tuple[bytes, SendFuture]] = []
    options: dict[str, Any] = {"timeout_s": SEND_S, "buffer_count_max": 20_000}
    if name != PIPELINED:
        options["in_flight_batches_max"] = 1
    with client.producer(**options) as producer:
        for number in count():
            if is_over.is_set():
                break
            data = f"{name}:{number}:".encode() + b"y" * (number % 300)
            ledger.tried[name].append(data)
            partition = "7-1" if name == PIPELINED else "7-0"
            sent.append((data, producer.send_nowait(TOPIC, data, partition=partition)))
            if number % 50 == 0:
                time.sleep(0.01)
        for data, future in sent:
            try:
                ledger.ack(data, future.result(SEND_S))
            except MetaqError as error:
                ledger.failed.append((data, str(error)))


def _consume(client: Client, ledger: Ledger, is_over: threading.Event) -> None:
    """Read as the only member of a group."""
    with client.consumer("ledger", [TOPIC], start="earliest", wait_s=1.0) as consumer:
        while not is_over.is_set():
            message = consumer.receive(0.2)
            if message is not None:
                ledger.give(message)


@contextmanager
def load(cluster: Cluster) -> Iterator[Ledger]:
    """Put and read while the block runs, then check all accounts.

    At the end the set is mended, readers get everything, and the replicas are stopped.
    """
    with puts(cluster) as ledger:
        yield ledger
    finish(cluster, ledger)


def finish(cluster: Cluster, ledger: Ledger) -> None:
    """Stop the replicas, and check all accounts."""
    cluster.wait_whole()
    cluster.stop()
    check(cluster, ledger)


@contextmanager
def puts(cluster: Cluster) -> Iterator[Ledger]:
    """Put and read while the block runs; the set is mended then, and runs on."""
    ledger = Ledger()
    sending_is_over, reading_is_over = threading.Event(), threading.Event()
    with cluster.client() as client:
        senders = [
            threading.Thread(target=work, args=(client, name, ledger, sending_is_over))
            for name, work in (
                ("each-a", _send_each),
                ("each-b", _send_each),
                ("batches", _send_nowait),
                (PIPELINED, _send_nowait),
            )
        ]
        reader = threading.Thread(
            target=_consume, args=(client, ledger, reading_is_over)
        )
        for thread in (*senders, reader):
            thread.start()
        try:
            wait_until(lambda: len(ledger.acked) > 20, SETTLE_S, cluster.describe)
            yield ledger
            cluster.mend()
        except BaseException:
            print(cluster.describe())
            raise
        finally:
            sending_is_over.set()
            for thread in senders:
                thread.join()
            try:
                _wait_given(ledger)
            finally:
                reading_is_over.set()
                reader.join()
                history = cluster.directory / "history.jsonl"
                ledger.write(history)
                # Of a test that fails all of it is kept.
                print(f"{history}:", *ledger.faults, sep="\n")


def read_all(cluster: Cluster, ledger: Ledger) -> dict[Place, bytes]:
    """Return what a new client reads, as soon as it has all that was acknowledged."""
    found: dict[Place, bytes] = {}
    until_s = time.monotonic() + SETTLE_S
    options: dict[str, Any] = {"start": "earliest", "wait_s": 1.0}
    with (
        cluster.client() as client,
        client.consumer("reader", [TOPIC], **options) as reader,
    ):
        while ledger.lost(found) and time.monotonic() < until_s:
            for message in iter(partial(reader.receive, 0.5), None):
                found[message.partition.partition, message.offset] = message.data
    return found


def _wait_given(ledger: Ledger) -> None:
    wait_until(
        lambda: ledger.acked.items() <= dict(ledger.given).items(),
        SETTLE_S,
        lambda: f"{len(ledger.acked)} acknowledged, {len(dict(ledger.given))} given",
    )


def check(cluster: Cluster, ledger: Ledger) -> None:
    """Compare the accounts with the copies, and the copies with each other."""
    history = cluster.directory / "history.jsonl"
    for replica in cluster.replicas.values():
        found = ledger.violations(replica.read_log())
        assert not found, f"replica {replica.number}: {found[:10]}; see {history}"
    first, *others = (replica.files() for replica in cluster.replicas.values())
    for number, other in enumerate(others, 2):
        names = {name for name, _ in first.items() ^ other.items()}
        sizes = {
            each: [len(f.get(each, b"")) for f in (first, other)] for each in names
        }
        assert not names, f"replicas 1 and {number} differ in {sizes}; see {history}"
    assert len(ledger.acked) > 100


def longest_pause_s(ledger: Ledger) -> float:
    """Return the longest time without an acknowledgement."""
    times = sorted(ledger.acked_s)
    return max((b - a for a, b in pairwise(times)), default=0.0)
