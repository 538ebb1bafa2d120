"""`metaq cat`: every message of a topic, in order, without a group."""

import json
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from metaq.cli.main import main
from metaq.client import Client
from tests.brokers import PYTHON, AnyBroker, StartBroker, broker_of
from tests.cli.runner import assert_ends_without_reader, id_at, run

NOON = 1_769_860_800_000  # 2026-01-31T12:00:00Z


ONE_BROKER = {
    "test_reading_begins_at_a_time": "MetaQ 1.4 knows no times",
    "java": "a message of any id, a damaged one, a broker that knows no times",
}


@pytest.fixture
def broker(start_broker: StartBroker) -> AnyBroker:
    return start_broker({"t": 2}, broker_id=7)


@pytest.fixture
def java(start_metaq_1_4: StartBroker) -> Any:
    return start_metaq_1_4({"t": 2}, broker_id=7)


def fill(broker: AnyBroker) -> None:
    for number in (0, 1):
        texts = [b"m%d" % n for n in range(number, 6, 2)]
        broker.put(*texts, topic="t", partition=number)


def test_all_partitions_come_one_after_the_other(broker: AnyBroker) -> None:
    """Each message and a line end; the order of each partition is kept."""
    fill(broker)
    result = run("cat", "t", broker=broker)
    assert result.exit_code == 0
    assert result.stdout == "m0\nm2\nm4\nm1\nm3\nm5\n"
    assert result.stderr == ""


def test_bytes_come_out_as_they_are(broker: AnyBroker) -> None:
    """Bytes that are no text are written unchanged."""
    broker.put(b"\xff\x00\r", topic="t")
    assert run("cat", "t", broker=broker).stdout_bytes == b"\xff\x00\r\n"


@pytest.mark.parametrize(("count", "text"), [(0, ""), (2, "m0\nm2\n"), (4, None)])
def test_max_stops_in_time(broker: AnyBroker, count: int, text: str | None) -> None:
    """No more than so many messages."""
    fill(broker)
    result = run("cat", "t", "--max", str(count), broker=broker)
    assert result.stdout == ("m0\nm2\nm4\nm1\n" if text is None else text)


def test_one_partition_can_be_chosen(broker: AnyBroker) -> None:
    """The others are not asked."""
    fill(broker)
    broker.close_partition("t", 0)
    result = run("cat", "t", "--partition", "7-1", broker=broker)
    assert result.stdout == "m1\nm3\nm5\n"


@pytest.mark.parametrize(
    ("start", "text"),
    [
        ("earliest", "m0\nm2\nm4\nm1\nm3\nm5\n"),
        ("latest", ""),
    ],
)
def test_reading_begins_where_it_is_told(
    broker: AnyBroker, start: str, text: str
) -> None:
    """At one of both ends of each partition."""
    fill(broker)
    assert run("cat", "t", "--from", start, broker=broker).stdout == text


@pytest.mark.slow
def test_reading_begins_at_a_time(tmp_path: Path) -> None:
    """Each partition begins at its own first message of that time or later."""
    with broker_of(PYTHON, tmp_path / "data", {"t": 2}) as broker:
        with Client(**broker.client_options) as client, client.producer() as producer:
            for n in range(6):
                producer.send("t", b"m%d" % n, partition=f"0-{n % 2}")
                before = time.time_ns()
                while time.time_ns() - before < 2_000_000:
                    """Have each message stamped with a time of its own."""
            stamps = {m.data: m.timestamp for m in client.browse("t")}
        for first, text in ((b"m3", "m4\nm3\nm5\n"), (b"m5", "m5\n")):
            for option in ("--from", "--since"):
                words = ["cat", "t", option, f"{stamps[first]:.3f}"]
                found = CliRunner().invoke(main, [*words, "--broker", broker.address])
                assert found.stdout == text, found.stderr
        for words, text in (
            (["--until", f"{stamps[b'm3']:.3f}"], "m0\nm2\nm1\n"),
            (["--until", f"{stamps[b'm3']:.3f}", "--last", "2"], "m1\nm2\n"),
            (["--until", "2026-01-31", "--since", "2026-01-30"], ""),
        ):
            words = ["cat", "t", *words, "--broker", broker.address]
            found = CliRunner().invoke(main, words)
            assert found.stdout == text, found.stderr


def test_a_broker_that_tells_no_time_is_named(java: Any) -> None:
    """MetaQ 1.4 cannot be asked for one."""
    fill(java)
    result = run("cat", "t", "--from", "2026-01-31", broker=java)
    assert result.exit_code == 1
    assert "no times" in result.stderr


def test_a_time_that_is_none_is_wrong_usage(broker: AnyBroker) -> None:
    """The error shows how to write one."""
    result = run("cat", "t", "--from", "soon", broker=broker)
    assert result.exit_code == 2
    assert "expected earliest, latest, or a time such as 2026-01-31T12:00" in (
        " ".join(result.stderr.split())
    )


def test_json_says_all_about_a_message(java: Any) -> None:
    """Partition and offset, id and time, attribute and data."""
    java.inner.add(b"m0", topic="t", message_id=id_at(NOON))
    result = run("cat", "t", "--json", "--max", "1", broker=java)
    assert json.loads(result.stdout) == {
        "topic": "t",
        "broker": 7,
        "partition": 0,
        "offset": 0,
        "id": id_at(NOON),
        "time": "2026-01-31T12:00:00.000Z",
        "attribute": None,
        "key": None,
        "key_base64": None,
        "headers": [],
        "data": "m0",
        "data_base64": None,
    }


def test_following_goes_on_until_it_has_enough(broker: AnyBroker) -> None:
    """--follow sees all partitions; --max ends it."""
    fill(broker)
    result = run("cat", "t", "--follow", "--max", "6", broker=broker)
    assert sorted(result.stdout.split()) == ["m0", "m1", "m2", "m3", "m4", "m5"]


@pytest.mark.slow
def test_a_reader_that_goes_away_ends_following_while_no_message_comes(
    broker: AnyBroker,
) -> None:
    """As `| head -1` does, and the shell waits for both."""
    broker.put(b"m0", topic="t")
    words = ["cat", "t", "--follow", "--broker", f"127.0.0.1:{broker.port}"]
    assert_ends_without_reader(words, b"m0\n")


@pytest.mark.slow
def test_the_newest_come_oldest_first(broker: AnyBroker) -> None:
    """Of all partitions together; none of them comes twice, or is left out."""
    for number in range(6):
        broker.put(b"m%d" % number, topic="t", partition=number % 2)
    for count, text in ((0, ""), (3, "m3\nm4\nm5\n"), (9, None)):
        result = run("cat", "t", "--last", str(count), broker=broker)
        wanted = "m0\nm1\nm2\nm3\nm4\nm5\n" if text is None else text
        assert result.stdout == wanted, result.stderr
    lines = run("cat", "t", "--last", "1", "--json", broker=broker).stdout
    assert json.loads(lines)["data"] == "m5"
    result = run("cat", "t", "--last", "2", "--partition", "7-0", broker=broker)
    assert result.stdout == "m2\nm4\n"


@pytest.mark.slow
def test_following_after_the_newest_leaves_nothing_out(broker: AnyBroker) -> None:
    """Messages that arrive in the meantime come once."""
    broker.put(b"m0", b"m1", topic="t", partition=0)
    put, result = ["m0", "m1"], []

    def follow() -> None:
        words = ["cat", "t", "--last", "2", "--follow", "--max", "5"]
        result.extend(run(*words, broker=broker).stdout.split())

    thread = threading.Thread(target=follow)
    thread.start()
    while thread.is_alive():
        put.append(f"new-{len(put)}")
        broker.put(put[-1].encode(), topic="t", partition=1)
        thread.join(0.02)
    first = put.index(result[0])
    assert result == put[first : first + 5]


@pytest.mark.slow
def test_a_condition_chooses_what_is_printed(broker: AnyBroker) -> None:
    """From the start, of the newest, while following; a wrong one is wrong usage."""
    with Client(brokers=[broker.address]) as client, client.producer() as producer:
        for number in range(6):
            producer.send(
                "t",
                b"m%d" % number,
                tag="odd" if number % 2 else None,
                partition="7-0",
            )
    where = "--where", "tag = 'odd'"
    for more, text in (
        ((), "m1 m3 m5"),
        (("--max", "1"), "m1"),
        (("--last", "2"), "m3 m5"),
        (("--follow", "--max", "3"), "m1 m3 m5"),
        (("--last", "1", "--follow", "--max", "1"), "m5"),
    ):
        result = run("cat", "t", *where, *more, broker=broker)
        assert result.stdout.split() == text.split(), result.stderr
    result = run("cat", "t", "--where", "tag odd", broker=broker)
    assert result.exit_code == 2
    assert "filter, column 5: expected" in result.stderr


def test_a_beginning_is_said_once(broker: AnyBroker) -> None:
    """Two of --from, --since and --last contradict each other; so does an end of
    what has none.
    """
    for words in (
        ["--last", "2", "--from", "latest"],
        ["--last", "2", "--since", "2026-01-31"],
        ["--from", "latest", "--since", "2026-01-31"],
    ):
        result = run("cat", "t", *words, broker=broker)
        assert result.exit_code == 2
        assert "--from, --since and --last exclude each other" in result.stderr
    result = run("cat", "t", "--follow", "--until", "2026-01-31", broker=broker)
    assert (result.exit_code, result.stdout) == (2, "")
    assert "--follow and --until exclude each other" in result.stderr
    result = run("cat", "t", "--until", "soon", broker=broker)
    assert (result.exit_code, result.stdout) == (2, "")
    assert "expected a time such as 2026-01-31T12:00" in result.stderr


def test_damage_is_an_error_with_an_offset(java: Any) -> None:
    """Good messages are printed; then the offset is named; the exit code is 1."""
    _, offset = java.put(b"good", b"bad", topic="t")
    java.inner.corrupt(offset, topic="t")
    result = run("cat", "t", broker=java)
    assert result.exit_code == 1
    assert result.stdout == "good\n"
    assert f"t/7-0: damaged record at offset {offset}: checksum" in result.stderr
