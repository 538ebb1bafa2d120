"""Figures of filters on the broker: messages passed over, and bytes on the wire.

One message in a hundred has the wanted tag. Both sides are blocking loops over a plain
socket: the floor gets and checks everything, the other gets only matching messages.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import count
from pathlib import Path
from urllib.parse import quote

from bench import load
from bench.consuming import read_and_check
from bench.figures import MIB, TOPIC, Figure, Turns, WithLines
from bench.lines import Payloads
from bench.producing import send_list
from metaq.client import Client, OutgoingMessage
from tests.rigs.process import BrokerProcess

COUNT = 1_000_000
RARE = 100
PER_LIST = 100_000
WHERE = quote("tag = 'paid'")
BUILD_S_MAX = 120.0


@contextmanager
def filled(directory: Path, payloads: Payloads, index: str) -> Iterator[BrokerProcess]:
    """Run a broker with the messages and, unless `index` is "", a complete index."""
    with BrokerProcess(directory / "filtered", topic=TOPIC, index=index) as broker:
        fill(broker, payloads)
        with Client(brokers=[f"127.0.0.1:{broker.port}"]) as client:
            end_s = time.monotonic() + BUILD_S_MAX
            while index:
                read = [0]
                list(client.find(TOPIC, header=("tag", b"none"), on_read=read.append))
                if read[-1] < 17 << 20:  # the rest is less than a block
                    break
                if time.monotonic() > end_s:
                    raise RuntimeError(f"no index after {BUILD_S_MAX} s: {read[-1]=}")
                time.sleep(1.0)
        yield broker


def fill(broker: BrokerProcess, payloads: Payloads) -> None:
    """Send messages with tags to a broker."""
    tags = [b"paid", *[b"other-%d" % number for number in range(1, RARE)]]
    messages = [
        OutgoingMessage(line, headers={"tag": tags[number % RARE]})
        for line, number in zip(payloads.repeat(PER_LIST), count(), strict=False)
    ]
    with Client(brokers=[f"127.0.0.1:{broker.port}"]) as client:
        for _ in range(COUNT // PER_LIST):
            send_list(messages, client)


def read_matches(port: int) -> tuple[float, int, int]:
    """Get matching messages; return seconds, bytes received, and the log end offset."""
    sock = load.connect(port)
    offset = received = 0
    begin = time.perf_counter()
    while True:
        ask = f"get {TOPIC} g 0 {offset} {MIB} 1 where={WHERE}\r\n"
        sock.sendall(ask.encode())
        data = sock.recv(MIB)
        head, _, body = data.partition(b"\r\n")
        words = head.split()
        if words[0] != b"value":
            break
        left = int(words[1]) - len(body)
        while left:
            left -= len(sock.recv(min(left, MIB)))
        if len(words) == 3:  # the parser is being loaded
            time.sleep(0.1)
            continue
        received += len(head) + 2 + int(words[1])
        offset = int(words[3].removeprefix(b"next="))
    sock.close()
    return time.perf_counter() - begin, received, offset


def passed(directory: Path, payloads: Payloads, *, index: str = "") -> Turns:
    """Messages per second that a filtered read passes over; the floor reads all."""
    with filled(directory, payloads, index) as broker:
        while True:
            plain = COUNT / read_and_check(broker.port)
            yield plain, COUNT / read_matches(broker.port)[0]


def on_the_wire(directory: Path, payloads: Payloads) -> Turns:
    """Bytes received by a filtered read; the floor is the length of the log."""
    with filled(directory, payloads, "") as broker:
        while True:
            _, received, end = read_matches(broker.port)
            yield end / MIB, received / MIB


_MATCHES = "1,000,000 messages, 1 % match a tag"
FIGURES: dict[str, Callable[[Path, int], Figure] | WithLines] = {
    "filter": WithLines(
        passed, f"filtered read, {_MATCHES} (floor: unfiltered)", "messages/s"
    ),
    "filter-indexed": WithLines(
        partial(passed, index="tag"),
        f"the same with an index of tags, {_MATCHES} (floor: unfiltered)",
        "messages/s",
    ),
    "filter-wire": WithLines(
        on_the_wire,
        f"bytes of a filtered read, {_MATCHES} (floor: of the log)",
        "MiB",
        "at most 0.02",
        "0.012",
    ),
}
