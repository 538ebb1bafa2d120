"""Transactions: local ones, small and large, XA cycles, and a start behind a kill.

Commands of a client that waits for nothing in between travel together: BEGIN, puts and
the verdict. The floor of a transaction is its puts alone, on the same connections.
"""

import select
import time
from collections.abc import Callable, Iterator
from itertools import count as counter
from pathlib import Path

from bench import load
from bench.figures import PAYLOAD, TOPIC, Figure
from tests.rigs.process import BrokerProcess

CLIENTS = 64

Exchange = list[tuple[bytes, int]]
"""Commands of one client, and the replies that it waits for, step by step."""


def restart(directory: Path, rounds: int) -> Figure:
    """Start behind a kill with 100,000 finished and 1,000 prepared transactions."""
    figure = Figure(
        "restart, 100,000 finished and 1,000 prepared transactions, kill -9",
        "s",
        [],
        at_least="2",
        aim="0.5",
    )
    numbers = counter(1)
    for number in range(rounds):
        path = directory / f"restart-{number}"
        with BrokerProcess(path, topic=TOPIC) as broker:
            _run(broker.port, lambda: _local(next(numbers), 1), 100_000)
            _run(broker.port, lambda: _prepared(next(numbers)), 1000)
            broker.kill()
            figure.broker.append(broker.start())
    return figure


def _beside_puts(
    name: str,
    unit: str,
    make: Callable[[int], Exchange],
    *,
    count: int,
    puts: int = 1,
    plain: Exchange | None = None,
    at_least: str,
    aim: str,
) -> Callable[[Path, int], Figure]:
    """Return a measurement of exchanges, in turn with their puts alone.

    Args:
        name: of the figure.
        unit: of its samples; of transactions, or of puts where there are several.
        make: makes the exchange of a number, from 1 on.
        count: of exchanges in a round.
        puts: of each exchange.
        plain: the same outside of a transaction; None: its puts one by one.
        at_least: rate to reach.
        aim: rate to aim at.
    """

    def measure(directory: Path, rounds: int) -> Figure:
        figure = Figure(name, unit, [], [], at_least=at_least, aim=aim)
        numbers = counter(1)
        frames = b"".join(load.put_frame(TOPIC, PAYLOAD, i) for i in range(puts))
        floor = plain or [(frames, puts)]
        with BrokerProcess(directory / "transactions", topic=TOPIC) as broker:
            for number in range(rounds + 1):
                floor_s = _run(broker.port, lambda: floor, count)
                seconds = _run(broker.port, lambda: make(next(numbers)), count)
                if number:
                    figure.floor.append(count * puts / floor_s)
                    figure.broker.append(count * puts / seconds)
        return figure

    return measure


def _put(key: str, number: int) -> bytes:
    line, _, body = load.put_frame(TOPIC, PAYLOAD, number).partition(b"\r\n")
    words = line.rsplit(b" ", 1)
    return b"%b %b %b\r\n%b" % (words[0], key.encode(), words[1], body)


def _local(number: int, puts: int) -> Exchange:
    key = f"TX:bench-{number % CLIENTS}:{number}"
    frames = b"".join(_put(key, each) for each in range(puts))
    begin = f"transaction {key} bench BEGIN 1\r\n".encode()
    commit = f"transaction {key} bench COMMIT_ONE_PHASE 2\r\n".encode()
    return [(begin + frames + commit, puts + 2)]


def _batch(number: int, count: int) -> Exchange:
    key = f"TX:bench-{number % CLIENTS}:{number}"
    line, _, body = load.mput_frame(TOPIC, PAYLOAD, count, 0).partition(b"\r\n")
    words = line.rsplit(b" ", 1)
    batch = b"%b %b %b\r\n%b" % (words[0], key.encode(), words[1], body)
    begin = f"transaction {key} bench BEGIN 1\r\n".encode()
    commit = f"transaction {key} bench COMMIT_ONE_PHASE 2\r\n".encode()
    return [(begin + batch + commit, 3)]


def _xa(number: int) -> Exchange:
    key = f"XID:1:{number:08x}:00:bench"
    commit = f"transaction {key} bench COMMIT_TWO_PHASE 2\r\n".encode()
    return [*_prepared(number), (commit, 1)]


def _prepared(number: int) -> Exchange:
    key = f"XID:1:{number:08x}:00:bench"
    begin = f"transaction {key} bench BEGIN 1\r\n".encode()
    prepare = f"transaction {key} bench PREPARE 2\r\n".encode()
    return [(begin + _put(key, 0) + prepare, 3)]


def _run(port: int, make: Callable[[], Exchange], count: int) -> float:
    """Carry out `count` exchanges, one under way on each connection; return seconds.

    They are made before the clock starts.
    """
    exchanges = [make() for _ in range(count)]
    socks = [load.connect(port) for _ in range(min(CLIENTS, count))]
    by_fd = {sock.fileno(): sock for sock in socks}
    steps: dict[int, Iterator[tuple[bytes, int]]] = {}
    owed: dict[int, int] = {}
    replies: dict[int, bytes] = {}
    poller = select.epoll()
    ended = 0

    def go_on(fd: int) -> None:
        nonlocal ended
        step = next(steps[fd], None) if fd in steps else None
        if step is None:
            ended += fd in steps
            if not exchanges:
                steps.pop(fd, None)
                return
            steps[fd] = iter(exchanges.pop())
            step = next(steps[fd])
        owed[fd], replies[fd] = step[1], b""
        by_fd[fd].sendall(step[0])

    for fd in by_fd:
        poller.register(fd, select.EPOLLIN)
    started = time.perf_counter()
    for fd in by_fd:
        go_on(fd)
    while ended < count:
        for fd, _event in poller.poll():
            data = by_fd[fd].recv(load.RECV_BYTES)
            replies[fd] += data
            if not data or b"result 5" in replies[fd]:
                raise RuntimeError(f"refused: {replies[fd][-400:]!r}")
            if replies[fd].count(b"result 200 ") == owed[fd]:
                go_on(fd)
    seconds = time.perf_counter() - started
    for sock in socks:
        sock.close()
    poller.close()
    return seconds


FIGURES = {
    "tx-local": _beside_puts(
        "local transactions of one put, 64 in flight (floor: the put)",
        "transactions/s",
        lambda number: _local(number, 1),
        count=20_000,
        at_least="5,000",
        aim="15,000",
    ),
    "tx-puts": _beside_puts(
        "puts in local transactions of 100 (floor: the puts)",
        "puts/s",
        lambda number: _local(number, 100),
        count=2000,
        puts=100,
        at_least="100,000",
        aim="250,000",
    ),
    "tx-batches": _beside_puts(
        "messages in local transactions of one batch of 100 (floor: the batch)",
        "messages/s",
        lambda number: _batch(number, 100),
        count=4000,
        puts=100,
        plain=[(load.mput_frame(TOPIC, PAYLOAD, 100, 0), 1)],
        at_least="100,000",
        aim="250,000",
    ),
    "tx-xa": _beside_puts(
        "XA cycles of one put, 64 in flight (floor: the put)",
        "cycles/s",
        _xa,
        count=8000,
        at_least="2,000",
        aim="6,000",
    ),
    "tx-restart": restart,
}
