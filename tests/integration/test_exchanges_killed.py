"""A broker process that is killed again and again while it routes."""

import os
import random
import signal
import time
from pathlib import Path

import pytest

from metaq.client import Client, UnroutableError
from tests.integration.registered import make_topic, registered_broker
from tests.rigs.waiting import wait_until

pytestmark = [pytest.mark.zookeeper, pytest.mark.slow, pytest.mark.timeout(900)]

COUNT = 6_000
KILLS = 3
PATIENCE_S = 120.0


def test_each_topic_has_each_message_once_and_in_order_over_kills(
    zookeeper: str, tmp_path: Path, rng: random.Random
) -> None:
    """Every send is answered in the end; the client sends again what it must."""
    broker = registered_broker(tmp_path / "data", zookeeper)
    with broker, Client(zookeeper) as client:
        for topic in ("all", "even"):
            make_topic(client, topic)
        admin = client.admin()
        admin.create_exchange("events")
        admin.bind("events", "all", key="n.#")
        admin.bind("events", "even", key="n.even")
        kills = sorted(rng.sample(range(COUNT), KILLS))
        futures = []
        with client.exchange("events", timeout_s=PATIENCE_S) as events:
            for number in range(COUNT):
                key = "n.odd" if number % 2 else "n.even"
                futures.append(events.send_nowait(key, b"%d" % number))
                if number in kills:
                    time.sleep(rng.uniform(0, 0.02))
                    broker.kill()
                    broker.start()
            events.flush(PATIENCE_S)
            # These kills may find nothing unanswered: of this one a request is certain.
            os.kill(broker.pid, signal.SIGSTOP)
            futures.append(events.send_nowait("n.even", b"%d" % COUNT))
            wait_until(lambda: events.statistics().in_flight_count)
            broker.kill()
            broker.start()
            events.flush(PATIENCE_S)
            assert [future.exception() for future in futures] == [None] * (COUNT + 1)
            with pytest.raises(UnroutableError):
                events.send("else", b"x")
            assert events.statistics().retried_count > 0
        found = {t: [each.data for each in client.browse(t)] for t in ("all", "even")}
    assert found["all"] == [b"%d" % number for number in range(COUNT + 1)]
    assert found["even"] == [b"%d" % number for number in range(0, COUNT + 1, 2)]
