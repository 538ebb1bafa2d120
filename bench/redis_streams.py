"""Redis Streams as a peer: `appendfsync always`, XADD, XREADGROUP and XACK by redis-py.

Redis syncs once for all commands that it reads together, before it answers them. The
server is the system's package, the client comes from PyPI, with its parser in C.
"""

import asyncio
import importlib
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from subprocess import Popen
from typing import Any

from bench.processes import add_wheels, killed
from bench.queue_load import START_TIMEOUT_S, Feed, Job, Side, Tally
from metaq.testing.servers import reserve_port
from tests.java.jars import NoJarsError

CLIENT = ("redis==8.1.0", "hiredis==3.5.0")
STREAM, GROUP, FIELD = "bench", "workers", "line"
PIPELINED = 500
"""Puts per pipeline."""
WAITING = ("BLOCK", 1000, "STREAMS", STREAM, ">")
SETTINGS = (
    "--bind 127.0.0.1 --appendonly yes --appendfsync always"
    " --auto-aof-rewrite-percentage 0 --save"
)


def find_redis(module: str) -> Any:
    """Return a module of redis-py.

    Raises:
        NoJarsError: the wheels are not available.
    """
    add_wheels(*CLIENT)
    return importlib.import_module(module)


@contextmanager
def redis(home: Path) -> Iterator[Side]:
    """Run a server with an empty stream and its group.

    Raises:
        NoJarsError: server or client are not available.
    """
    program = shutil.which("redis-server")
    if program is None:
        raise NoJarsError("no Redis is installed: Debian has it as redis-server")
    client = find_redis("redis")
    home.mkdir()
    with (home / "output").open("wb") as log:
        port = reserve_port(log)
        words = [program, "--port", str(port), "--dir", str(home), *SETTINGS.split()]
        with (
            killed(Popen([*words, ""], stdout=log, stderr=log)) as server,
            client.Redis(port=port) as connection,
        ):
            end_s = time.monotonic() + START_TIMEOUT_S
            while True:
                try:
                    connection.xgroup_create(STREAM, GROUP, mkstream=True)
                    break
                except client.ConnectionError:
                    if time.monotonic() > end_s:
                        raise
                    time.sleep(0.05)
            yield Side("redis_streams", str(port), server.pid)


def produce(job: Job) -> None:
    """Send pipelines, one at a time."""
    feed = Feed(job)
    with find_redis("redis").Redis(port=int(job.address)) as connection:
        connection.xadd(STREAM, {FIELD: feed.first()})
        feed.wait()
        for batch in feed.batches(PIPELINED):
            pipeline = connection.pipeline(transaction=False)
            for data in batch:
                pipeline.xadd(STREAM, {FIELD: data})
            pipeline.execute()


def work(job: Job) -> None:
    """Run the workers on one event loop, each with a connection."""
    asyncio.run(work_all(job, find_redis("redis.asyncio")))


async def work_all(job: Job, client: Any) -> None:
    """Ack all messages read by one command, and read more in the same packet.

    Uses the client's bare connections, because its command methods take most of a core.
    """
    tally = Tally(job)

    async def work_one(name: str) -> None:
        connection = client.Connection(port=int(job.address), protocol=2)
        await connection.connect()
        tally.ready()
        read = "XREADGROUP", "GROUP", GROUP, name, "COUNT", job.prefetch, *WAITING
        ids: list[bytes] = []
        while True:
            commands = [("XACK", STREAM, GROUP, *ids), read] if ids else [read]
            await connection.send_packed_command(connection.pack_commands(commands))
            if ids:
                tally.done(await connection.read_response())
            found = await connection.read_response()
            ids = []
            for one, (_field, data) in found[0][1] if found else ():
                ids.append(one)
                tally.deliver(data)

    async with asyncio.TaskGroup() as tasks:
        for number in range(job.workers):
            tasks.create_task(work_one(f"{job.board}-{number}"))
