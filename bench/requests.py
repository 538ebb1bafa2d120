"""Request and reply, one at a time, beside RabbitMQ's direct reply-to.

On both sides the request is a message in a durable queue, and synced; the reply stays
in memory. One process sends requests, another replies, with the same lines and in the
fastest way of each client.

    python -m bench.requests ours|rabbit ask|answer ADDRESS LINES
"""

import asyncio
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from bench.figures import TOPIC, Turns, WithLines
from bench.lines import Payloads
from bench.processes import ROOT, killed
from bench.queue_load import Side
from bench.queues import ours
from bench.rabbit import QUEUE, find_pika, rabbit
from metaq.client import AsyncClient

COUNT = 2000
WARM_UPS = 200
TIMEOUT_S = 60.0


async def ask(address: str, lines: list[bytes]) -> list[float]:
    """Return the time of each request, seconds."""
    took_s = []
    async with AsyncClient(address) as client:
        for number in range(WARM_UPS + COUNT):
            data = lines[number % len(lines)]
            began_s = time.perf_counter()
            reply = await client.request(TOPIC, data, timeout=TIMEOUT_S)
            took_s.append(time.perf_counter() - began_s)
            assert reply == data
    return took_s[WARM_UPS:]


async def answer(address: str) -> None:
    async def echo(message: Any) -> bytes:
        return bytes(message.data)

    async with AsyncClient(address) as client:
        await client.responder(TOPIC, group="bench").run(echo)


def open_rabbit(address: str, begin: Callable[[Any], None]) -> None:
    """Run the loop of a connection with one channel until it is closed."""
    pika = find_pika()
    connection = pika.SelectConnection(
        pika.ConnectionParameters("127.0.0.1", int(address)),
        on_open_callback=lambda one: one.channel(on_open_callback=begin),
        on_close_callback=lambda *_: connection.ioloop.stop(),
    )
    connection.ioloop.start()


def ask_rabbit(address: str, lines: list[bytes]) -> list[float]:
    took_s, began_s = list[float](), 0.0

    def send(channel: Any) -> None:
        nonlocal began_s
        began_s = time.perf_counter()
        properties = find_pika().BasicProperties(
            delivery_mode=2, reply_to="amq.rabbitmq.reply-to", expiration="60000"
        )
        data = lines[len(took_s) % len(lines)]
        channel.basic_publish("", QUEUE, data, properties)

    def on_reply(channel: Any, _method: Any, _properties: Any, data: bytes) -> None:
        took_s.append(time.perf_counter() - began_s)
        assert data == lines[(len(took_s) - 1) % len(lines)]
        if len(took_s) == WARM_UPS + COUNT:
            channel.connection.close()
        else:
            send(channel)

    def begin(channel: Any) -> None:
        channel.basic_consume(
            "amq.rabbitmq.reply-to",
            on_reply,
            auto_ack=True,
            callback=lambda _ok: send(channel),
        )

    open_rabbit(address, begin)
    return took_s[WARM_UPS:]


def answer_rabbit(address: str) -> None:
    def handle(channel: Any, method: Any, properties: Any, data: bytes) -> None:
        channel.basic_publish("", properties.reply_to, data)
        channel.basic_ack(method.delivery_tag)

    def begin(channel: Any) -> None:
        channel.basic_qos(prefetch_count=32)
        channel.basic_consume(QUEUE, handle)

    open_rabbit(address, begin)


def run_side(side: str, role: str, address: str, path: str) -> None:
    lines = Path(path).read_bytes().split(b"\n")
    if role == "answer":
        asyncio.run(answer(address)) if side == "ours" else answer_rabbit(address)
        return
    is_ours = side == "ours"
    took_s = asyncio.run(ask(address, lines)) if is_ours else ask_rabbit(address, lines)
    json.dump([each * 1000 for each in took_s], sys.stdout)


def round_of(side: str, at: Side, path: Path) -> list[float]:
    words = [sys.executable, "-m", "bench.requests", side]
    more = [at.address, str(path)]
    with killed(subprocess.Popen([*words, "answer", *more], cwd=ROOT)):
        asked = subprocess.run(
            [*words, "ask", *more], cwd=ROOT, stdout=subprocess.PIPE, check=True
        )
    return [float(each) for each in json.loads(asked.stdout)]


def beside(directory: Path, payloads: Payloads) -> Turns:
    """A round of RabbitMQ, then one of ours.

    Raises:
        NoJarsError: RabbitMQ is not available.
    """
    path = directory / "lines"
    path.write_bytes(b"\n".join(payloads.data))
    sides: list[tuple[str, AbstractContextManager[Side]]] = [
        ("rabbit", rabbit(directory / "rabbit")),
        ("ours", ours(directory / "ours")),
    ]
    (theirs, peer), (mine, cluster) = sides
    with peer as first, cluster as second:
        while True:
            yield (
                statistics.median(round_of(theirs, first, path)),
                statistics.median(round_of(mine, second, path)),
            )


FIGURES = {
    "request-reply": WithLines(
        beside,
        "request and reply, p50 (floor: RabbitMQ, direct reply-to, a quorum queue)",
        "ms",
        "at most 1.0",
        "at most 0.71",
    )
}

if __name__ == "__main__":
    run_side(*sys.argv[1:])
