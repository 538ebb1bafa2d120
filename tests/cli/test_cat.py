"""`metaq cat`: every message of a topic, in order, without a group."""

import json
import time
from pathlib import Path

import pytest
from click.testing import CliRunner

from metaq.cli.main import main
from metaq.client import Client
from metaq.protocol.commands import Get
from metaq.testing.embedded import embedded_broker
from tests.cli.runner import run
from tests.client.memory_broker import MemoryBroker, id_at

NOON = 1_769_860_800_000  # 2026-01-31T12:00:00Z


def fill(broker: MemoryBroker) -> None:
    for n in range(6):
        moment = id_at(NOON + 1000 * n)
        broker.add(b"m%d" % n, partition=n % 2, message_id=moment)


def test_all_partitions_come_one_after_the_other() -> None:
    """Each message and a line end; the order of each partition is kept."""
    with MemoryBroker() as broker:
        fill(broker)
        result = run("cat", "t", broker=broker)
        assert result.exit_code == 0
        assert result.stdout == "m0\nm2\nm4\nm1\nm3\nm5\n"
        assert result.stderr == ""


def test_bytes_come_out_as_they_are() -> None:
    """What is no text is written unchanged."""
    with MemoryBroker() as broker:
        broker.add(b"\xff\x00\r")
        assert run("cat", "t", broker=broker).stdout_bytes == b"\xff\x00\r\n"


@pytest.mark.parametrize(("count", "text"), [(0, ""), (2, "m0\nm2\n"), (4, None)])
def test_max_stops_in_time(count: int, text: str | None) -> None:
    """No more than so many messages."""
    with MemoryBroker() as broker:
        fill(broker)
        result = run("cat", "t", "--max", str(count), broker=broker)
        assert result.stdout == ("m0\nm2\nm4\nm1\n" if text is None else text)


def test_one_partition_can_be_chosen() -> None:
    """The others are not asked."""
    with MemoryBroker() as broker:
        fill(broker)
        result = run("cat", "t", "--partition", "7-1", broker=broker)
        assert result.stdout == "m1\nm3\nm5\n"
        gets = [c for c in broker.commands if isinstance(c, Get)]
        assert {c.partition for c in gets} == {1}


@pytest.mark.parametrize(
    ("start", "text"),
    [
        ("earliest", "m0\nm2\nm4\nm1\nm3\nm5\n"),
        ("latest", ""),
    ],
)
def test_reading_begins_where_it_is_told(start: str, text: str) -> None:
    """At one of both ends of each partition."""
    with MemoryBroker() as broker:
        fill(broker)
        assert run("cat", "t", "--from", start, broker=broker).stdout == text


def test_reading_begins_at_a_time(tmp_path: Path) -> None:
    """Each partition begins at its own first message of that time or later."""
    with embedded_broker(topics={"t": 2}, data_path=tmp_path / "data") as broker:
        with Client(**broker.client_options) as client, client.producer() as producer:
            for n in range(6):
                producer.send("t", b"m%d" % n, partition=f"0-{n % 2}")
                before = time.time_ns()
                while time.time_ns() - before < 2_000_000:
                    """Have each message stamped with a time of its own."""
            stamps = {m.data: m.timestamp for m in client.browse("t")}
        for first, text in ((b"m3", "m4\nm3\nm5\n"), (b"m5", "m5\n")):
            words = ["cat", "t", "--from", f"{stamps[first]:.3f}"]
            found = CliRunner().invoke(main, [*words, "--broker", broker.address])
            assert found.stdout == text, found.stderr


def test_a_broker_that_tells_no_time_is_named() -> None:
    """MetaQ 1.4 cannot be asked for one."""
    with MemoryBroker() as broker:
        fill(broker)
        result = run("cat", "t", "--from", "2026-01-31", broker=broker)
        assert result.exit_code == 1
        assert "no times" in result.stderr


def test_a_time_that_is_none_is_wrong_usage() -> None:
    """The error shows how to write one."""
    with MemoryBroker() as broker:
        result = run("cat", "t", "--from", "soon", broker=broker)
        assert result.exit_code == 2
        assert "2026-01-31T12:00" in result.stderr


def test_json_says_all_about_a_message() -> None:
    """Where it lies, its id and time, attribute and data."""
    with MemoryBroker() as broker:
        fill(broker)
        result = run("cat", "t", "--json", "--max", "1", broker=broker)
        assert json.loads(result.stdout) == {
            "topic": "t",
            "broker": 7,
            "partition": 0,
            "offset": 0,
            "id": id_at(NOON),
            "time": "2026-01-31T12:00:00.000Z",
            "attribute": None,
            "data": "m0",
        }


def test_following_goes_on_until_it_has_enough() -> None:
    """--follow sees all partitions; --max ends it."""
    with MemoryBroker() as broker:
        fill(broker)
        result = run("cat", "t", "--follow", "--max", "6", broker=broker)
        assert sorted(result.stdout.split()) == ["m0", "m1", "m2", "m3", "m4", "m5"]


def test_damage_is_an_error_with_an_offset() -> None:
    """What is good is printed; then the place is named; the exit code is 1."""
    with MemoryBroker() as broker:
        broker.add(b"good")
        offset = broker.add(b"bad")
        broker.segments["t", 0][-1][-1] ^= 1
        result = run("cat", "t", broker=broker)
        assert result.exit_code == 1
        assert result.stdout == "good\n"
        assert f"t/7-0: damaged record at offset {offset}: checksum" in result.stderr
