"""Requests while a responder is killed: the next one answers what it has begun."""

import subprocess
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from metaq.client import Client
from tests.integration.registered import make_topic, registered_broker
from tests.rigs.fork_server import executable
from tests.rigs.waiting import wait_until

pytestmark = [pytest.mark.zookeeper, pytest.mark.slow, pytest.mark.timeout(300)]

RESPONDER = """
import sys, time
from metaq.client import Client

def handle(message):
    time.sleep(0.02)
    return sys.argv[2].encode() + b":" + message.data

with Client(sys.argv[1]) as client:
    client.responder("prices", group="quotes", prefetch=8).run(handle)
"""
REQUESTS = 200


def respond(zookeeper: str, name: str) -> "subprocess.Popen[bytes]":
    return subprocess.Popen([executable(), "-c", RESPONDER, zookeeper, name])


def test_every_request_is_answered_though_a_responder_is_killed(
    zookeeper: str, tmp_path: Path
) -> None:
    """Messages that it held come back when its connection is gone for two seconds."""
    with registered_broker(tmp_path / "data", zookeeper), Client(zookeeper) as client:
        make_topic(client, "prices")
        processes = [respond(zookeeper, name) for name in ("one", "two")]
        by = list[bytes]()

        def ask(number: int) -> None:
            reply = client.request("prices", b"%d" % number, timeout=60)
            name, _, data = reply.partition(b":")
            assert data == b"%d" % number
            by.append(name)

        try:
            with ThreadPoolExecutor(16) as threads:
                asked = threads.map(ask, range(REQUESTS))
                wait_until(lambda: {b"one", b"two"} <= {*by})
                processes[0].kill()
                assert len([*asked]) == REQUESTS
        finally:
            for each in processes:
                each.kill()
                each.wait(30)
        answered = Counter(by)
        assert answered.total() == REQUESTS
        assert answered[b"two"] > answered[b"one"]
