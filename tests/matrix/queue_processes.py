"""Workers and producers of a queue group as processes, to be killed and stopped.

They are forked from a process that has imported the client. Each enters what it does
into the book of the run.
"""

import asyncio
import logging
import os
import signal
import threading
import time
from collections.abc import Callable
from functools import partial
from itertools import count
from multiprocessing import get_context
from multiprocessing.process import BaseProcess
from pathlib import Path
from random import Random
from typing import Any, Final, Literal

from metaq.client import AsyncClient, Client
from metaq.errors import MetaqError
from tests.matrix.queue_book import Book, Place

SESSION_S: Final = 6.0
BATCH: Final = 5
PAUSE_S: Final = 0.02
"""Between two batches of a producer."""
KEYS: Final = 24
TAGS: Final = ("work", "other")
KINDS: Final = ("job", "note")
HANG_S: Final = 2.2
"""Longer than a lease and `handle_s_max` together."""
GROUP_OPTIONS: Final = {"lease_s": 1.0, "retry_delays_s": (0.1, 0.3)}
WORKER_OPTIONS: Final = {"handle_s_max": 0.6, "prefetch": 12, "concurrency": 4}
STOP_S: Final = 60.0

_fork = get_context("forkserver")
_fork.set_forkserver_preload(["metaq.client.session", __name__])

Act = tuple[float, str, dict[str, Any]]
"""Seconds of work, then a verb and its arguments."""


def act_of(message: Any, random: Random) -> Act:
    """Return what a worker does with a message: its data says so, or chance."""
    kind = message.data.partition(b":")[0]
    if kind == b"poison":
        return 0, "die", {}
    if kind == b"reject":
        return 0, "reject", {"reason": "by name"}
    if kind == b"stops":
        return 0 if _stops(message) else 3.0, "ack", {}
    number = random.random()
    if kind == b"plain" or number < 0.80:
        return random.random() * 0.01, "ack", {}
    if number < 0.88:
        return 0, "nack", {"delay": random.choice([None, 0.0, 0.2])}
    if number < 0.94:
        return 0, "release", {}
    if number < 0.97:
        return random.random(), "ack", {}
    return (HANG_S, "ack", {}) if number < 0.98 else (0, "reject", {"reason": "odd"})


def _stops(message: Any) -> bool:
    """Return whether a message stops the process of the first worker that has it."""
    return message.data.startswith(b"stops:") and message.deliveries == 1


class _Notes:
    """Notes of one worker about one message."""

    def __init__(self, book: Book, name: str, message: Any) -> None:
        self._book = book
        self._stops = _stops(message)
        self._fields = {
            "worker": name,
            "place": Place.of(message),
            "delivery": message.held.delivery,
        }
        key = None if message.key is None else message.key.decode()
        book.note(
            "took",
            **self._fields,
            begun=message.held.since_s,
            count=message.deliveries,
            data=message.data.decode(),
            key=key,
        )

    def said(self, verb: str) -> None:
        """Note what is about to be said."""
        if self._stops:
            # To this thread: it would go on for a moment if another one had it.
            signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)
        self._book.note("said", **self._fields, verb=verb)
        if verb == "die":
            os.kill(os.getpid(), signal.SIGKILL)

    def told(self, verb: str, error: MetaqError | None) -> None:
        """Note the answer."""
        kind = "" if error is None else type(error).__name__
        self._book.note("told", **self._fields, verb=verb, error=kind, text=str(error))


def work(
    name: str,
    book: Book,
    zookeeper: str,
    topic: str,
    *,
    concurrency: int,
    **options: Any,
) -> None:
    """Take and settle in threads until SIGTERM."""
    random, ending = Random(name), threading.Event()

    def handle(message: Any) -> None:
        notes = _Notes(book, name, message)
        pause_s, verb, arguments = act_of(message, random)
        time.sleep(pause_s)
        notes.said(verb)
        try:
            getattr(message, verb)(**arguments)
        except MetaqError as error:
            notes.told(verb, error)
        else:
            notes.told(verb, None)

    signal.signal(signal.SIGTERM, lambda *_: ending.set())
    with (
        Client(zookeeper, session_timeout_s=SESSION_S) as client,
        client.queue(topic, **options) as queue,
    ):
        book.note("works", worker=name)
        while not ending.is_set():
            queue.run(handle, concurrency=concurrency, timeout=0.5)


def work_async(
    name: str,
    book: Book,
    zookeeper: str,
    topic: str,
    *,
    concurrency: int,
    worker_count: int = 1,
    **options: Any,
) -> None:
    """Take and settle in tasks until SIGTERM, as one worker or several."""
    random = Random(name)

    async def handle(worker: str, message: Any) -> None:
        notes = _Notes(book, worker, message)
        pause_s, verb, arguments = act_of(message, random)
        await asyncio.sleep(pause_s)
        notes.said(verb)
        try:
            await getattr(message, verb)(**arguments)
        except MetaqError as error:
            notes.told(verb, error)
        else:
            notes.told(verb, None)

    async def main() -> None:
        ending = asyncio.Event()
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, ending.set)

        async def one(client: AsyncClient, worker: str) -> None:
            async with client.queue(topic, **options) as queue:
                book.note("works", worker=worker)
                while not ending.is_set():
                    await queue.run(
                        partial(handle, worker), concurrency=concurrency, timeout=0.5
                    )

        async with AsyncClient(zookeeper, session_timeout_s=SESSION_S) as client:
            if worker_count == 1:
                await one(client, name)
                return
            names = [f"{name}.{number}" for number in range(worker_count)]
            await asyncio.gather(*(one(client, worker) for worker in names))

    asyncio.run(main())


def produce(name: str, book: Book, zookeeper: str, topic: str) -> None:
    """Send batches until SIGTERM, each after the former is answered."""
    ending = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: ending.set())
    with (
        Client(zookeeper, session_timeout_s=SESSION_S) as client,
        client.producer(timeout_s=STOP_S) as producer,
    ):
        for number in count():
            if ending.is_set():
                return
            key = f"k{number % KEYS}"
            batch = [f"any:{name}:{number}:{n}".encode() for n in range(BATCH)]
            futures = [producer.send_nowait(topic, data, key=key) for data in batch]
            for data, future in zip(batch, futures, strict=True):
                try:
                    result = future.result(STOP_S)
                except MetaqError as error:
                    book.note("not put", data=data.decode(), error=str(error))
                else:
                    book.note("put", data=data.decode(), place=Place.of(result))
            ending.wait(PAUSE_S)


def route(name: str, book: Book, zookeeper: str, exchange: str) -> None:
    """Send to an exchange until SIGTERM, half of it with a time.

    Data says how a message goes: `any:<tag>:<kind>:...`.
    """
    random, ending = Random(name), threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: ending.set())
    with (
        Client(zookeeper, session_timeout_s=SESSION_S) as client,
        client.exchange(exchange, timeout_s=STOP_S) as events,
    ):
        for number in count():
            if ending.is_set():
                return
            futures = {}
            for place in range(BATCH):
                tag, kind = random.choice(TAGS), random.choice(KINDS)
                data = f"any:{tag}:{kind}:{name}:{number}:{place}"
                delay = random.choice((None, random.uniform(0.1, 3.0)))
                book.note("sends", data=data, due=time.monotonic() + (delay or 0))
                key = f"k{random.randrange(KEYS)}"
                futures[data] = events.send_nowait(
                    f"orders.{kind}", data.encode(), key=key, tag=tag, delay=delay
                )
            for data, future in futures.items():
                try:
                    future.result(STOP_S)
                except MetaqError as error:
                    book.note("not sent", data=data, error=str(error))
                else:
                    book.note("sent", data=data)
            ending.wait(PAUSE_S)


def _run(work: Callable[..., None], name: str, path: Path, log: Path, *a: Any) -> None:
    logging.basicConfig(
        filename=log, level=logging.INFO, format="%(asctime)s %(message)s"
    )
    *arguments, options = a
    work(name, Book(path), *arguments, **options)


class Child:
    """A process that works or produces."""

    def __init__(
        self,
        kind: Literal["sync", "async", "producer", "router"],
        name: str,
        book: Book,
        *arguments: str,
        **options: Any,
    ) -> None:
        """Start it."""
        call = {
            "sync": work,
            "async": work_async,
            "producer": produce,
            "router": route,
        }[kind]
        log = book.path.with_name(f"{name}.log")
        self.name = name
        self._process: BaseProcess = _fork.Process(
            target=_run, args=(call, name, book.path, log, *arguments, options)
        )
        self._process.start()

    @property
    def is_alive(self) -> bool:
        """Whether it runs."""
        return self._process.is_alive()

    def send(self, number: int) -> None:
        """Send it a signal."""
        assert self._process.pid is not None
        os.kill(self._process.pid, number)

    def kill(self) -> None:
        """Kill it as the kernel does."""
        self._process.kill()
        self._process.join()

    def stop(self) -> None:
        """Let it end in order, and wait for it."""
        self._process.terminate()
        self._process.join(STOP_S)
        assert self._process.exitcode == 0, f"{self.name}: {self._process.exitcode}"
