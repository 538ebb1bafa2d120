"""The producer, whose broker is killed again and again while it sends."""

import os
import signal
import threading
import time
from pathlib import Path
from random import Random

import pytest

from metaq.client import Client
from metaq.client.produce.batches import SendFuture
from tests.crash.accounts import read_log, seed_from_environment
from tests.rigs.process import BrokerProcess
from tests.rigs.waiting import wait_until
from tests.sampling import IS_WHOLE

ROUNDS = int(os.environ.get("METAQ_CRASH_ROUNDS") or (8 if IS_WHOLE else 3))

pytestmark = [pytest.mark.crash, pytest.mark.slow, pytest.mark.timeout(900)]


def test_every_message_is_stored_once_however_often_the_broker_is_killed(
    tmp_path: Path,
) -> None:
    """Two threads send on; all is acknowledged, stored once, in order."""
    seed = seed_from_environment()
    print(f"METAQ_SEED={seed}")
    random = Random(seed)
    is_over = threading.Event()
    sent: dict[str, list[SendFuture]] = {"a": [], "b": []}
    broker = BrokerProcess(tmp_path / "data", topic="crash", segment_bytes=3_000_000)
    with (
        broker,
        Client(brokers=[f"127.0.0.1:{broker.port}"], reconnect_max_s=0.2) as client,
        client.producer(timeout_s=60, buffer_count_max=20_000) as producer,
    ):
        producer.send("crash", b"first")

        def send_on(name: str) -> None:
            while not is_over.is_set():
                number = len(sent[name])
                data = f"{name}:{number}:".encode() + b"x" * (number % 300)
                sent[name].append(producer.send_nowait("crash", data))
                if number % 100 == 0:
                    time.sleep(0.001)

        threads = [threading.Thread(target=send_on, args=(name,)) for name in sent]
        for thread in threads:
            thread.start()
        for _ in range(ROUNDS):
            time.sleep(random.uniform(0.1, 0.4))
            broker.kill()
            broker.start()
        is_over.set()
        for thread in threads:
            thread.join()
        producer.flush(60)
        # These kills may find nothing unanswered: of this one a request is certain.
        os.kill(broker.pid, signal.SIGSTOP)
        number = len(sent["a"])
        sent["a"].append(producer.send_nowait("crash", f"a:{number}:".encode()))
        wait_until(lambda: producer.statistics().in_flight_count)
        broker.kill()
        broker.start()
        results = {name: [f.result(60) for f in fs] for name, fs in sent.items()}
        found = read_log(broker.port, 0)
        retried = producer.statistics().retried_count
    for name, ours in results.items():
        for number, result in enumerate(ours):
            mark = f"{name}:{number}:".encode()
            assert found[result.offset].startswith(mark)
        assert [r.offset for r in ours] == sorted(r.offset for r in ours)
    assert len(found) == 1 + sum(map(len, results.values())), "stored twice"
    assert retried
