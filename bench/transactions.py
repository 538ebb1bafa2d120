"""Transactions: local ones, small and large, XA cycles, and a start after a kill.

A client sends BEGIN, puts and the decision together, without waiting in between. The
floor of a transaction is its puts alone, on the same connections.
"""

import select
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import count as counter
from itertools import cycle, islice
from pathlib import Path

from bench import load
from bench.figures import PAYLOAD, TOPIC, Figure, Turns, WithLines
from bench.lines import Payloads
from tests.rigs.process import BrokerProcess

CLIENTS = 64

Exchange = list[tuple[bytes, int]]
"""Steps of one client: commands, and the number of replies to wait for."""


def restart(directory: Path, rounds: int) -> Figure:
    """Start after a kill with 100,000 finished and 1,000 prepared transactions."""
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
            _run(broker.port, lambda: _local(next(numbers), [PAYLOAD]), 100_000)
            _run(broker.port, lambda: _prepared(next(numbers), [PAYLOAD]), 1000)
            broker.kill()
            figure.broker.append(broker.start())
    return figure


def beside_puts(
    directory: Path,
    payloads: Payloads,
    *,
    make: Callable[[int, list[bytes]], Exchange],
    count: int,
    puts: int = 1,
    in_batches: bool = False,
) -> Turns:
    """Transactions, in turn with their puts alone.

    Args:
        directory: parent of the broker's data directory.
        payloads: payloads of the puts.
        make: returns the exchange for a number, from 1 on, and payloads.
        count: number of exchanges per round.
        puts: number of puts per exchange.
        in_batches: whether the floor sends the puts of an exchange as a batch.
    """
    numbers = counter(1)
    lines = cycle(payloads.data)

    def next_lines() -> list[bytes]:
        return list(islice(lines, puts))

    def plain() -> Exchange:
        if in_batches:
            return [(load.batch_frame(TOPIC, next_lines(), 0), 1)]
        return [(_puts(next_lines()), puts)]

    with BrokerProcess(directory / "transactions", topic=TOPIC) as broker:
        while True:
            floor_s = _run(broker.port, plain, count)
            seconds = _run(
                broker.port, lambda: make(next(numbers), next_lines()), count
            )
            yield count * puts / floor_s, count * puts / seconds


def _puts(lines: list[bytes], key: str | None = None) -> bytes:
    return b"".join(
        load.put_frame(TOPIC, line, i, key=key) for i, line in enumerate(lines)
    )


def _local(number: int, lines: list[bytes]) -> Exchange:
    key = f"TX:bench-{number % CLIENTS}:{number}"
    return _decided(key, _puts(lines, key), len(lines))


def _batch(number: int, lines: list[bytes]) -> Exchange:
    key = f"TX:bench-{number % CLIENTS}:{number}"
    return _decided(key, load.batch_frame(TOPIC, lines, 0, key=key), 1)


def _decided(key: str, commands: bytes, count: int) -> Exchange:
    begin = f"transaction {key} bench BEGIN 1\r\n".encode()
    commit = f"transaction {key} bench COMMIT_ONE_PHASE 2\r\n".encode()
    return [(begin + commands + commit, count + 2)]


def _xa(number: int, lines: list[bytes]) -> Exchange:
    key = f"XID:1:{number:08x}:00:bench"
    commit = f"transaction {key} bench COMMIT_TWO_PHASE 2\r\n".encode()
    return [*_prepared(number, lines), (commit, 1)]


def _prepared(number: int, lines: list[bytes]) -> Exchange:
    key = f"XID:1:{number:08x}:00:bench"
    begin = f"transaction {key} bench BEGIN 1\r\n".encode()
    prepare = f"transaction {key} bench PREPARE 2\r\n".encode()
    return [(begin + _puts(lines, key) + prepare, len(lines) + 2)]


def _run(port: int, make: Callable[[], Exchange], count: int) -> float:
    """Carry out `count` exchanges, one under way on each connection; return seconds.

    They are built before the clock starts.
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


FIGURES: dict[str, Callable[[Path, int], Figure] | WithLines] = {
    "tx-local": WithLines(
        partial(beside_puts, make=_local, count=20_000),
        "local transactions of one put, 64 in flight (floor: the put)",
        "transactions/s",
        "5,000",
        "15,000",
    ),
    "tx-puts": WithLines(
        partial(beside_puts, make=_local, count=2000, puts=100),
        "puts in local transactions of 100 (floor: the puts)",
        "puts/s",
        "100,000",
        "250,000",
    ),
    "tx-batches": WithLines(
        partial(beside_puts, make=_batch, count=4000, puts=100, in_batches=True),
        "messages in local transactions of one batch of 100 (floor: the batch)",
        "messages/s",
        "100,000",
        "250,000",
    ),
    "tx-xa": WithLines(
        partial(beside_puts, make=_xa, count=8000),
        "XA cycles of one put, 64 in flight (floor: the put)",
        "cycles/s",
        "2,000",
        "6,000",
    ),
    "tx-restart": restart,
}
