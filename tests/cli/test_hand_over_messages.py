"""A directory with scheduled messages and a queue group, handed over and taken back."""

import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from metaq.client import Client
from metaq.errors import DataMissingError
from metaq.model import MessageId
from metaq.record.layout import encode_record
from metaq.testing.embedded import EmbeddedBroker
from tests.cli.runner import run
from tests.client.queue_user import data_of, handle
from tests.rigs.waiting import wait_until

ONE_BROKER = {
    "broker": "MetaQ has no messages with a time",
    "test_what_waits_is_delivered_once_after_the_way_back": "MetaQ has no queue groups",
}
GROUP: Any = {"group": "workers", "then": "drop"}
JOBS = [b"%d" % number for number in range(8)]


@pytest.fixture
def broker(tmp_path: Path) -> EmbeddedBroker:
    return EmbeddedBroker(
        tmp_path / "data",
        topics={"jobs": 1, "timed": 1},
        settings={"dataLogPath": str(tmp_path / "journal"), "queueReclaimMs": "1"},
    )


def put_as_java(directory: Path, data: bytes, message_id: int) -> None:
    """Append a message as another broker does, which knows of no other file."""
    (segment,) = directory.glob("*.meta")
    with open(segment, "ab") as file:
        file.write(encode_record(data, id=MessageId(message_id)))


@pytest.mark.slow
def test_what_waits_is_delivered_once_after_the_way_back(
    broker: EmbeddedBroker, tmp_path: Path
) -> None:
    """Also one due while another broker had the directory; done jobs stay done."""
    with broker, Client(**broker.client_options) as client:
        with client.producer() as producer:
            last = producer.send_many("jobs", JOBS)[-1]
            producer.send("timed", b"soon", delay=0.5)
            producer.send("timed", b"late", delay="1h")
        before = handle(client, "jobs", 3, **GROUP)
        broker.stop()
        ini = (broker.data_path / "server.ini").rename(tmp_path / "server.ini")
        there = run("hand-over", str(broker.data_path), "--yes")
        assert there.exit_code == 0, there.output
        assert "__queues-" in there.stdout
        assert "__delays-" in there.stdout
        names = {path.name for path in broker.data_path.iterdir()}
        assert names <= {"jobs-0", "timed-0"}
        put_as_java(broker.data_path / "jobs-0", b"java", last.message_id + 1)
        with pytest.raises(DataMissingError, match=r"'metaq hand-over .*/data --back'"):
            broker.start()
        assert {path.name for path in broker.data_path.glob("*-*")} == names
        back = run("hand-over", str(broker.data_path), "--back")
        assert back.exit_code == 0, back.output
        shutil.move(ini, broker.data_path / "server.ini")
        broker.start()
        after = handle(client, "jobs", len(JOBS) - 2, **GROUP)
        assert Counter(before + after) == Counter([*JOBS, b"java"])
        wait_until(lambda: data_of(client, "timed") == [b"soon"])
        assert client.admin().scheduled("timed").message_count == 1
        broker.restart()
        with client.queue("jobs", **GROUP) as queue:
            assert queue.receive(0.3) is None
        assert data_of(client, "timed") == [b"soon"]
