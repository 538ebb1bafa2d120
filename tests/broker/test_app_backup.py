"""A data directory that is copied, and put back later: what waits, and what is done."""

import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from metaq.client import Client
from metaq.testing.embedded import EmbeddedBroker
from tests.client.queue_user import data_of, handle
from tests.rigs.waiting import wait_until

ONE_BROKER = {"broker": "MetaQ has no queue groups, and no messages with a time"}
LEFT_OUT = shutil.ignore_patterns(".lock", "admin.sock", "deleted", "server.ini")
OPTIONS: dict[str, Any] = {"group": "workers", "then": "drop"}
JOBS = [b"%d" % number for number in range(8)]
SOON_S = 3.0
"""A busy machine takes a message back before it is due."""


@pytest.fixture
def broker(tmp_path: Path) -> EmbeddedBroker:
    return EmbeddedBroker(
        tmp_path / "data",
        topics={"jobs": 2, "timed": 1},
        settings={"queueReclaimMs": "1"},
    )


@pytest.mark.slow
def test_a_copy_that_is_put_back_has_what_waited_and_what_was_done_then(
    broker: EmbeddedBroker, tmp_path: Path
) -> None:
    """Messages due in between come once; later ones and done ones do not come."""
    backup = tmp_path / "backup"
    with broker, Client(**broker.client_options) as client:
        with client.producer() as producer:
            producer.send_many("jobs", JOBS)
            producer.send("timed", b"soon", delay=SOON_S)
            late = producer.send("timed", b"late", delay="1h")
            gone = producer.send("timed", b"gone", delay=SOON_S)
            assert producer.cancel(gone)
        before = handle(client, "jobs", 3, **OPTIONS)
        broker.stop()
        shutil.copytree(broker.data_path, backup, ignore=LEFT_OUT)
        broker.start()
        after = handle(client, "jobs", len(JOBS) - 3, **OPTIONS)
        assert Counter(before + after) == Counter(JOBS)
        wait_until(lambda: data_of(client, "timed") == [b"soon"])
        with client.producer() as producer:
            assert producer.cancel(late)
        broker.stop()
        shutil.rmtree(broker.data_path)
        shutil.copytree(backup, broker.data_path)
        broker.start()
        assert Counter(handle(client, "jobs", len(JOBS) - 3, **OPTIONS)) == Counter(
            after
        )
        wait_until(lambda: data_of(client, "timed") == [b"soon"])
        assert client.admin().scheduled("timed").message_count == 1
        with client.queue("jobs", **OPTIONS) as queue:
            assert queue.receive(0.3) is None
        assert data_of(client, "timed") == [b"soon"]
