"""A disk or database that hangs for ever, and the end of its process."""

import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import asyncio, sys, threading
from pathlib import Path
from metaq.client import AsyncClient, Client, RequestTimeoutError
from metaq.client.consume import local_retry_store
from metaq.client.produce import ordered_producer
from metaq.client.offsets.file_offsets import FileOffsets
from metaq.client.sql_offsets import SqlOffsets
from metaq.fs import SystemFileSystem

world, what, place = sys.argv[1:]

def hang(*args, **named):
    threading.Event().wait()

class Disk(SystemFileSystem):
    exists = lock_file = hang

ordered_producer.SystemFileSystem = local_retry_store.SystemFileSystem = Disk
SqlOffsets._load = hang

def make(client):
    if what == "spool":
        return client.ordered_producer("test", "0:1", place)
    stores = {"file": lambda: FileOffsets(Path(place) / "offsets", files=Disk()),
              "database": lambda: SqlOffsets("sqlite://")}
    return client.consumer("g", ["test"], partitions=["0-0"], offsets=stores[what]())

options = {"brokers": ["127.0.0.1:9"], "close_timeout_s": 0.2}

def blocking():
    with Client(**options) as client:
        make(client).start(timeout=0.2)

async def looping():
    async with AsyncClient(**options) as client:
        await make(client).start(timeout=0.2)

try:
    blocking() if world == "sync" else asyncio.run(looping())
except RequestTimeoutError:
    print("ended")
"""


@pytest.mark.slow
@pytest.mark.parametrize("world", ["sync", "async"])
@pytest.mark.parametrize("what", ["file", "database", "spool"])
def test_what_hangs_does_not_keep_the_process_alive(
    tmp_path: Path, world: str, what: str
) -> None:
    """The client gave up in time; the interpreter does not wait for its thread."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, world, what, str(tmp_path)],
        capture_output=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, b"ended\n"), done.stderr.decode()
