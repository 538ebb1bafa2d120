"""The parser takes a tenth of a second to load, and no event loop waits for that."""

import subprocess
import sys

import pytest

SCRIPT = """
import asyncio, sys

from metaq.client import AsyncClient
from metaq.client.cluster.queue_groups import QueueGroupDefinitions
from metaq.clock import SystemClock
from metaq.filter.language import has_parser
from metaq.testing.embedded import embedded_broker
from metaq.testing.zk import MemoryZooKeeper
from metaq.zk.group_definitions import QueueGroupDefinition, encode_group
from metaq.zk.paths import NodePaths
from metaq.zk.session import SessionState
from tests.rigs.waiting import until, wait_until

GROUP = QueueGroupDefinition(topic="t", where="tag = 'a'")

def on_event(event, words):
    if event == "import" and words[0] == "lark":
        print(asyncio._get_running_loop() is None)

def define(broker):
    broker.zookeeper.put(NodePaths().queue_group("g"), encode_group(GROUP))

async def ask(broker, what):
    async with AsyncClient(**broker.client_options) as client:
        if what == "list":
            await client.admin().queue_groups()
        elif what == "create":
            await client.admin().create_queue_group(
                "h", "t", then="drop", where="tag = 'a'"
            )

async def look():
    server, clock = MemoryZooKeeper(), SystemClock()
    server.put(NodePaths().queue_group("g"), encode_group(GROUP))
    coordinator = server.coordinator(clock)
    coordinator.start()
    await until(lambda: coordinator.status.state is SessionState.CONNECTED)
    groups = QueueGroupDefinitions(coordinator, NodePaths(), clock.monotonic_s() + 5)
    assert (await groups.ensure("g", "t", {})) == GROUP
    await coordinator.stop(deadline_s=clock.monotonic_s() + 5)

what = sys.argv[1]
sys.addaudithook(on_event)
with embedded_broker(topics={"t": 1}) as broker:
    assert not has_parser()
    if what == "broker":
        define(broker)
        wait_until(has_parser)
    elif what == "look":
        asyncio.run(look())
    else:
        asyncio.run(ask(broker, what))
    assert has_parser()
"""


def run(script: str, what: str) -> "subprocess.CompletedProcess[bytes]":
    words = [sys.executable, "-c", script, what]
    return subprocess.run(words, capture_output=True, timeout=60, check=False)


@pytest.mark.slow
@pytest.mark.parametrize("what", ["broker", "list", "look", "create"])
def test_no_loop_loads_the_parser(what: str) -> None:
    """A broker that reads a definition, and a client that reads or writes one."""
    done = run(SCRIPT, what)
    assert done.returncode == 0, done.stderr
    assert done.stdout == b"True\n"


@pytest.mark.slow
def test_a_filter_that_is_none_is_not_written() -> None:
    """Also as the first one of a program."""
    done = run(SCRIPT.replace("tag = 'a'", "tag ="), "create")
    assert b"FilterError" in done.stderr.splitlines()[-1]
