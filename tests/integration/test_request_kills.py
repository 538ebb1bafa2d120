"""Requests while a responder is killed, and while the broker of a mailbox hangs."""

import os
import signal
import subprocess
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest

from metaq.client import Client, ReplyTimeoutError
from tests.client.worlds import parts_of
from tests.integration.registered import make_topic, registered_broker
from tests.rigs.fork_server import executable
from tests.rigs.waiting import wait_until

pytestmark = [pytest.mark.zookeeper, pytest.mark.slow, pytest.mark.timeout(900)]

RESPONDER = """
import sys, time
from metaq.client import Client, ReplyTimeoutError

def handle(message):
    time.sleep(0.02)
    return sys.argv[2].encode() + b":" + message.data

with Client(sys.argv[1]) as client:
    client.responder("prices", group="quotes", prefetch=8).run(handle)
"""
THREADS = 16
REQUESTS = 50


def respond(zookeeper: str, name: str) -> "subprocess.Popen[bytes]":
    return subprocess.Popen([executable(), "-c", RESPONDER, zookeeper, name])


def test_a_mailbox_leaves_a_broker_that_hangs(zookeeper: str, tmp_path: Path) -> None:
    """Requests have replies again, though its connection is still open."""
    with ExitStack() as stack:
        brokers = {
            number: stack.enter_context(
                registered_broker(tmp_path / str(number), zookeeper, brokerId=number)
            )
            for number in (1, 2)
        }
        client = stack.enter_context(Client(zookeeper))
        wait_until(lambda: len(parts_of(client).metadata.snapshot.brokers) == 2)
        make_topic(client, "prices", brokers=[1])
        stack.callback(kill, respond(zookeeper, "one"))
        hanging = client
        while True:  # its mailbox is at one of them, by chance
            assert hanging.request("prices", b"a", timeout=60) == b"one:a"
            last = max(client.browse("prices"), key=lambda message: message.offset)
            if last.headers["reply-to"].startswith(b"2/"):
                break
            hanging = stack.enter_context(Client(zookeeper))
        os.kill(brokers[2].pid, signal.SIGSTOP)
        stack.callback(os.kill, brokers[2].pid, signal.SIGCONT)

        def is_answered() -> bool:
            try:
                return hanging.request("prices", b"b", timeout=2) == b"one:b"
            except ReplyTimeoutError:
                return False

        wait_until(is_answered)


def kill(process: "subprocess.Popen[bytes]") -> None:
    process.kill()
    process.wait(30)


def test_every_request_is_answered_though_a_responder_is_killed(
    zookeeper: str, tmp_path: Path
) -> None:
    """Messages that it held come back when its connection is gone for two seconds."""
    with registered_broker(tmp_path / "data", zookeeper), Client(zookeeper) as client:
        make_topic(client, "prices")
        processes = [respond(zookeeper, name) for name in ("one", "two")]
        ready, asked_both, is_killed = set[bytes](), set[bytes](), threading.Event()

        def are_ready() -> bool:
            ready.add(client.request("prices", b"", timeout=60).partition(b":")[0])
            return len(ready) == len(processes)

        def ask(number: int) -> bytes:
            reply = client.request("prices", b"%d" % number, timeout=60)
            name, _, data = reply.partition(b":")
            assert data == b"%d" % number
            return name

        def ask_on(number: int) -> None:
            while not is_killed.is_set():
                asked_both.add(ask(number))

        try:
            # Else the first one has answered most before the other one is there.
            wait_until(are_ready)
            with ThreadPoolExecutor(THREADS) as threads:
                asked = [threads.submit(ask_on, number) for number in range(THREADS)]
                try:
                    wait_until(lambda: asked_both == {b"one", b"two"})
                    processes[0].kill()
                finally:
                    is_killed.set()
                for each in asked:
                    each.result()
                assert [*threads.map(ask, range(REQUESTS))] == [b"two"] * REQUESTS
        finally:
            for process in processes:
                kill(process)
