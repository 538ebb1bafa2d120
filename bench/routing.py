"""Figures of exchanges: a topic exchange with a thousand bindings, beside RabbitMQ.

One process sends lines in the fastest way of its client; each is confirmed when it is
on disk in all its queues or topics. A routing key matches one binding, or one for each
of eight topics. RabbitMQ has quorum queues.
"""

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from kazoo.client import KazooClient

from bench.committing import cluster
from bench.figures import MIB, Figure, Turns, WithLines
from bench.lines import Payloads
from bench.processes import resident_bytes
from bench.queue_load import Side
from bench.rabbit import QUORUM, find_pika, rabbit
from metaq.client import Client
from metaq.routing.match import Binding, ExchangeKind
from metaq.zk.exchange_definitions import (
    ExchangeDefinition,
    binding_name,
    encode_binding,
    encode_exchange,
)
from metaq.zk.paths import NodePaths

BINDINGS = 1000
TARGETS = 8
COUNT = {1: 100_000, TARGETS: 20_000}
IN_FLIGHT = 1000
BINDERS = 32
TIMEOUT_S = 120.0
EXCHANGE = "bench-events"
HELD = 10_000
SETTLE_S = 3.0
KINDS = (ExchangeKind.TOPIC, ExchangeKind.DIRECT, ExchangeKind.HEADERS)
KEYS = {1: "order.7.new", TARGETS: "all.x.y"}


def bindings() -> Iterator[tuple[str, str]]:
    """Yield topic and pattern of each binding."""
    names = [f"routed-{number}" for number in range(TARGETS)]
    yield from ((name, "all.#") for name in names)
    for number in range(BINDINGS - TARGETS):
        yield names[number % TARGETS], f"order.{number}.*"


def send_to_ours(client: Client, payloads: Payloads, targets: int) -> float:
    """Send lines, wait for all at the end; return messages per second."""
    lines, key = payloads.repeat(COUNT[targets]), KEYS[targets]
    with client.exchange(EXCHANGE, timeout_s=TIMEOUT_S) as exchange:
        exchange.send(key, lines[0])
        start = time.perf_counter()
        futures = [exchange.send_nowait(key, line) for line in lines]
        exchange.flush(TIMEOUT_S)
        seconds = time.perf_counter() - start
        assert futures[-1].exception() is None
    return len(lines) / seconds


@contextmanager
def ours(directory: Path) -> Iterator[Client]:
    """Run our broker with the exchange."""
    topics = [f"routed-{number}" for number in range(TARGETS)]
    with cluster(directory, 1, topics) as (address, _), Client(address) as client:
        while not client.partitions(topics[-1]):
            time.sleep(0.1)
        admin = client.admin()
        admin.create_exchange(EXCHANGE)
        with ThreadPoolExecutor(BINDERS) as binders:
            bind = partial(admin.bind, EXCHANGE, timeout=TIMEOUT_S)
            for each in [binders.submit(bind, t, key=p) for t, p in bindings()]:
                each.result()
        yield client


def bind_theirs(side: Side) -> None:
    """Create RabbitMQ's exchange, queues and bindings."""
    pika = find_pika()
    place = pika.ConnectionParameters("127.0.0.1", int(side.address))
    with pika.BlockingConnection(place) as connection:
        channel = connection.channel()
        channel.exchange_declare(EXCHANGE, "topic", durable=True)
        for name in {name for name, _ in bindings()}:
            channel.queue_declare(name, durable=True, arguments=QUORUM)
        for name, pattern in bindings():
            channel.queue_bind(name, EXCHANGE, pattern)


def send_to_theirs(side: Side, payloads: Payloads, targets: int) -> float:
    """Publish with at most `IN_FLIGHT` unconfirmed; return messages per second."""
    pika, lines = find_pika(), payloads.repeat(COUNT[targets])
    persistent = pika.BasicProperties(delivery_mode=2)
    sent = confirmed = 0
    start = 0.0

    def begin(channel: Any) -> None:
        def fill() -> None:
            nonlocal sent
            while sent < len(lines) and sent - confirmed < IN_FLIGHT:
                channel.basic_publish(EXCHANGE, KEYS[targets], lines[sent], persistent)
                sent += 1

        def on_confirm(frame: Any) -> None:
            nonlocal confirmed
            assert frame.method.NAME == "Basic.Ack", frame
            confirmed = frame.method.delivery_tag
            if confirmed == len(lines):
                channel.connection.close()
            elif sent - confirmed <= IN_FLIGHT // 2:
                fill()

        def on_ready(_ok: Any) -> None:
            nonlocal start
            start = time.perf_counter()
            fill()

        channel.confirm_delivery(on_confirm, on_ready)

    connection: Any = pika.SelectConnection(
        pika.ConnectionParameters("127.0.0.1", int(side.address)),
        on_open_callback=lambda one: one.channel(on_open_callback=begin),
        on_close_callback=lambda *_: connection.ioloop.stop(),
    )
    connection.ioloop.start()
    return len(lines) / (time.perf_counter() - start)


def beside(directory: Path, payloads: Payloads, *, targets: int) -> Turns:
    with rabbit(directory / "rabbit") as theirs, ours(directory / "ours") as client:
        bind_theirs(theirs)
        while True:
            yield (
                send_to_theirs(theirs, payloads, targets),
                send_to_ours(client, payloads, targets),
            )


def _rate(targets: int, at_least: str, aim: str) -> WithLines:
    return WithLines(
        partial(beside, targets=targets),
        f"topic exchange, {BINDINGS} bindings, {targets} of them match (floor:"
        " RabbitMQ, quorum queues)",
        "messages/s",
        at_least,
        aim,
    )


def held(directory: Path, rounds: int, *, is_start: bool) -> Figure:
    """Memory, or time of a start, of a broker with bindings of three kinds.

    A start ends when all bindings in ZooKeeper are in effect. At first the broker has
    them from its copy, so memory is measured later, when it watches all nodes.
    """
    name = f"{HELD:,} bindings of exchanges, topic, direct, headers: "
    figure = Figure(
        name + ("a start until they are in effect" if is_start else "memory"),
        "s" if is_start else "MiB",
        [],
        at_least="5" if is_start else "64",
        is_ratio=False,
    )
    topics, paths = ["routed-0"], NodePaths("/meta")
    with cluster(directory, 1, topics) as (address, broker):
        idle = resident_bytes(broker.pid)
        zookeeper = KazooClient(address)
        zookeeper.start()
        for kind in KINDS:
            parent = paths.bindings(kind.value)
            zookeeper.ensure_path(parent)
            definition = encode_exchange(ExchangeDefinition(kind=kind))
            zookeeper.create(paths.exchange(kind.value), definition, makepath=True)
            every = [held_binding(kind, n) for n in range(HELD // len(KINDS))]
            for at in range(0, len(every), 500):
                transaction = zookeeper.transaction()
                for each in every[at : at + 500]:
                    path = paths.binding(kind.value, binding_name(each))
                    transaction.create(path, encode_binding(each))
                transaction.commit()
        zookeeper.stop()
        zookeeper.close()
        for _ in range(rounds):
            broker.stop()
            start_s = time.perf_counter()
            broker.start()
            with Client(address, request_timeout_s=TIMEOUT_S) as client:
                while not client.partitions(topics[0]):
                    time.sleep(0.01)
                for kind in KINDS:
                    wait_in_effect(client, kind)
            if is_start:
                figure.broker.append(time.perf_counter() - start_s)
            else:
                time.sleep(SETTLE_S)
                figure.broker.append((resident_bytes(broker.pid) - idle) / MIB)
    return figure


def held_binding(kind: ExchangeKind, number: int) -> Binding:
    if kind is ExchangeKind.HEADERS:
        headers = (("customer", str(number)), ("region", "eu"))
        return Binding("routed-0", headers=headers)
    rest = ".*" if kind is ExchangeKind.TOPIC else ""
    return Binding("routed-0", f"order.{number}{rest}")


def wait_in_effect(client: Client, kind: ExchangeKind) -> None:
    """Unbind a missing binding, which returns when all bindings are in effect."""
    if kind is ExchangeKind.HEADERS:
        client.admin().unbind(kind.value, "routed-0", headers={"none": None})
    else:
        client.admin().unbind(kind.value, "routed-0", key="none")


FIGURES: dict[str, Callable[[Path, int], Figure] | WithLines] = {
    "route-memory": partial(held, is_start=False),
    "route-start": partial(held, is_start=True),
    "route-one-rabbit": _rate(1, "3", "8"),
    "route-eight-rabbit": _rate(TARGETS, "2", "5"),
}
