"""The recipes of docs/recipes.md run as they stand, and do what the page says."""

import inspect
import json
import os
import re
import signal
import socket
import sqlite3
import subprocess
import sys
import time
import urllib.request
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import closing
from dataclasses import fields
from itertools import chain
from pathlib import Path

import pytest

from metaq.client import Admin, Client, Consumer, ConsumerOptions, Message, Producer
from metaq.client.foreign_names import OURS
from tests.docs import kafka_names
from tests.docs.blocks import ROOT
from tests.docs.programs import (
    ADDRESS,
    INTERRUPTED,
    WAIT_S,
    Program,
    local_zookeeper,
    make_chroot,
    python_files,
)
from tests.integration.registered import make_topic

PAGE = ROOT / "docs" / "recipes.md"
TEXT = PAGE.read_text()
FILES = python_files(TEXT)
COUNT = 3000
LOOSE = {"for"}
"""Words of code that name nothing of ours."""
SESSION = "session_timeout_s=4"
"""Partitions of a killed member are free after so long."""

pytestmark = [pytest.mark.slow, pytest.mark.zookeeper]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with local_zookeeper(tmp_path_factory.mktemp("local")) as address:
        yield address


@pytest.fixture
def zookeeper(server: str, tmp_path: Path) -> Iterator[str]:
    """Give an empty tree with a broker of its own: groups of killed members stay."""
    address = make_chroot(server, uuid.uuid4().hex)
    with local_zookeeper(tmp_path, f"zk.zkConnect={address}"):
        yield address


@pytest.fixture
def client(zookeeper: str) -> Iterator[Client]:
    """Give a client of the cluster, which has the topics of the page."""
    with Client(zookeeper) as one:
        for topic in ("orders", "jobs", "carts", "enriched"):
            make_topic(one, topic, partitions=2)
        yield one


Start = Callable[..., Program]


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


@pytest.fixture
def start(tmp_path: Path, zookeeper: str) -> Start:
    """Give what starts a recipe, with other addresses and a shorter session."""

    def start(name: str, port: int = 8080, command: tuple[str, ...] = ()) -> Program:
        text = FILES[name].replace(f'"{ADDRESS}"', f'"{zookeeper}", {SESSION}')
        text = text.replace("8080", str(port))
        (tmp_path / name).write_text(text)
        return Program(list(command) or [name], tmp_path)

    return start


def publish(
    client: Client,
    topic: str,
    count: int,
    first: int = 0,
    partition: str | None = None,
) -> list[bytes]:
    """Send numbers, by default to both partitions."""
    sent = [b"%d" % number for number in range(first, first + count)]
    with client.producer() as producer:
        for data in sent:
            producer.send_nowait(topic, data, partition=partition)
    return sent


def rows(database: Path, query: str) -> list[bytes]:
    """Return the rows as another process sees them; none before there is a table."""
    connection = sqlite3.connect(database)
    try:
        return sorted(row for (row,) in connection.execute(query))
    except sqlite3.OperationalError:
        return []
    finally:
        connection.close()


def wait_until(is_so: Callable[[], bool]) -> None:
    end_s = time.monotonic() + WAIT_S
    while not is_so():
        assert time.monotonic() < end_s
        time.sleep(0.02)


def test_every_block_of_python_has_a_name_and_a_length() -> None:
    """One without would not be run; ten to thirty lines are a recipe."""
    assert TEXT.count("```python") == len(FILES) > 0
    lengths = {name: len(text.strip().splitlines()) for name, text in FILES.items()}
    assert {name: n for name, n in lengths.items() if not 5 <= n <= 45} == {}


def test_every_recipe_has_a_test() -> None:
    """By its file's name."""
    text = Path(__file__).read_text()
    assert [name for name in FILES if f'"{name}"' not in text] == []


def test_recipes_have_the_types_of_the_client(tmp_path: Path) -> None:
    """By mypy's strictest rules, as in an editor."""
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    command = [sys.executable, "-m", "mypy", "--strict", "--config-file", os.devnull]
    done = subprocess.run(
        [*command, "--cache-dir", str(ROOT / ".mypy_cache" / "recipes"), *FILES],
        env={**os.environ, "MYPYPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=300,
        cwd=tmp_path,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_options_of_kafka_are_those_that_the_client_answers() -> None:
    """`python -m tests.docs.kafka_names` writes the table; no name is left out."""
    assert TEXT.endswith(kafka_names.table())
    names = chain.from_iterable(kafka_names.DEFAULTS.values())
    named = {name.replace(".", "_") for name in names}
    assert named | kafka_names.OTHERS == OURS.keys()
    assert not named & kafka_names.OTHERS


def test_calls_that_kafkas_users_are_led_to_are_there() -> None:
    """Each name before a bracket or alone in the last column is one of ours."""
    section = TEXT.partition("| confluent-kafka |")[2].partition("\n\n")[0]
    cells = [row.split(" | ")[-1] for row in section.splitlines()[2:]]
    codes = re.findall(r"`([^`]+)`", "\n".join(cells))
    names = {
        name.rpartition(".")[2]
        for code in codes
        for name in re.findall(r"^\w[\w.]*|[\w.]+(?=\()|\w+(?==)", code)
    }
    classes = (Client, Producer, Consumer, Admin, Message, Future)
    known = {name for one in classes for name in dir(one)} | {"TopicPattern"}
    for one in (
        Client.consumer,
        Producer.send,
        Consumer.batches,
        Consumer.receive_many,
    ):
        known.update(inspect.signature(one).parameters)
    known.update(field.name for field in fields(ConsumerOptions))
    assert len(names) > 30
    assert names - known == set(LOOSE)


@pytest.mark.parametrize(
    ("name", "query"),
    [
        ("into_database.py", "SELECT data FROM orders"),
        ("own_offsets.py", "SELECT data FROM bills"),
    ],
)
def test_rows_are_there_once_although_the_program_is_killed(
    client: Client, start: Start, tmp_path: Path, name: str, query: str
) -> None:
    """Killed as soon as it has stored something; then a second one goes on."""
    database = tmp_path / ("orders.db" if "orders" in query else "bills.db")
    sent = publish(client, "orders", COUNT)
    with start(name) as first:
        first.wait_for("ed\n")
        assert first.end(signal.SIGKILL) == -signal.SIGKILL
    sent += publish(client, "orders", COUNT, first=COUNT)
    with start(name) as second:
        wait_until(lambda: len(rows(database, query)) >= len(sent))
        assert second.end(signal.SIGINT) in INTERRUPTED
    assert rows(database, query) == sorted(sent)


@pytest.mark.parametrize("name", ["enrich.py", "async_enrich.py"])
def test_messages_are_made_once_although_the_program_is_killed(
    client: Client, start: Start, name: str
) -> None:
    """Killed when it has committed something; then a second one goes on, in order."""
    sent = publish(client, "orders", COUNT)
    with start(name) as first:
        first.wait_for("enriched\n")
        assert first.end(signal.SIGKILL) == -signal.SIGKILL
    sent += publish(client, "orders", COUNT, first=COUNT)
    wanted = sorted(data + b"!" for data in sent)
    with start(name) as second:
        wait_until(lambda: count(client, "enriched") >= len(wanted))
        assert second.end(signal.SIGINT) in INTERRUPTED
    assert sorted(message.data for message in client.browse("enriched")) == wanted


def count(client: Client, topic: str) -> int:
    return sum(1 for _ in client.browse(topic))


def test_a_member_that_was_late_bills_nothing(
    client: Client, start: Start, tmp_path: Path
) -> None:
    """Its transaction is refused when another one has stored those messages."""
    publish(client, "orders", 10, partition="0-0")
    with start("own_offsets.py") as one:
        one.wait_for("ed\n")
        wait_until(
            lambda: len(rows(tmp_path / "bills.db", "SELECT data FROM bills")) == 10
        )
        with closing(sqlite3.connect(tmp_path / "bills.db")) as database, database:
            database.execute("UPDATE offsets SET next = next + 100000")
        publish(client, "orders", 10, partition="0-0")
        assert one.end() == 1
        assert "is read by another member" in one.output()
    assert len(rows(tmp_path / "bills.db", "SELECT data FROM bills")) == 10


@pytest.mark.parametrize("name", ["workers.py", "async_workers.py"])
def test_workers_end_by_sigterm_and_what_fails_is_handled_again(
    client: Client, start: Start, name: str
) -> None:
    """No number is a dead letter; sent again, it is read again."""
    publish(client, "jobs", 20)
    with client.producer() as producer:
        producer.send("jobs", b"seven", key="user-1")
    with start(name) as workers:
        workers.wait_for("square", 20)
        wait_until(lambda: len(list(client.browse("jobs.dead"))) == 1)
        workers.end(signal.SIGTERM)
    with start("again.py") as again:
        assert again.end() == 0, again.output()
        assert "ValueError" in again.output()
    *_, last = client.browse("jobs", last=1)
    assert (last.data, last.key) == (b"seven", b"user-1")
    group = name.removesuffix(".py").replace("_", "-")
    lags = [one.lag for one in client.admin().describe_group(group).partitions]
    assert sum(lag.messages or 0 for lag in lags if lag) == 1


def test_a_web_application_publishes_handles_and_ends(
    client: Client, start: Start
) -> None:
    """A request's answer says where it is; SIGTERM leaves nothing uncommitted."""
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    words = ("-m", "uvicorn", "shop:app", "--port", str(port))
    with start("shop.py", command=words) as shop:
        shop.wait_for("Application startup complete")
        shop.wait_for("Uvicorn running")
        with urllib.request.urlopen(
            f"{url}/carts", data=b"apple", timeout=10
        ) as answer:
            stored = json.load(answer)
        (message,) = client.browse("carts")
        assert stored == {"partition": message.partition.name, "offset": message.offset}

        def health() -> object:
            with urllib.request.urlopen(f"{url}/health", timeout=10) as answer:
                return json.load(answer)

        wait_until(lambda: health() == {"handled": 1, "problems": []})
        shop.end(signal.SIGTERM)
        assert "Application shutdown complete" in shop.output()
    assert committed(client, "shop") == message.next_offset


def committed(client: Client, group: str) -> int | None:
    """Return the one committed offset beyond the log start."""
    found = client.admin().committed_offsets(group).values()
    return max((one.offset for one in found), default=None)


def connect(port: int) -> socket.socket:
    """Connect as soon as somebody listens."""
    end_s = time.monotonic() + WAIT_S
    while True:
        try:
            return socket.create_connection(("127.0.0.1", port), timeout=WAIT_S)
        except OSError:
            assert time.monotonic() < end_s
            time.sleep(0.02)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_service_of_plain_asyncio_ends_by_signals(
    client: Client, start: Start, number: int
) -> None:
    """Each line is answered with its place, and committed at the end."""
    port = free_port()
    with start("service.py", port=port) as service:
        with connect(port) as link:
            link.sendall(b"apple\n")
            answer = link.recv(100)
        service.wait_for("handled b'apple'")
        assert service.end(number) == 0, service.output()
    (message,) = client.browse("carts")
    assert answer == f"{message.partition} {message.offset}\n".encode()
    assert committed(client, "service") == message.next_offset


def test_a_monitor_names_partitions_without_an_owner(
    client: Client, start: Start
) -> None:
    """A group that nobody reads has an unowned partition with messages."""
    publish(client, "orders", 100)
    with client.consumer("sleepers", ["orders"]) as consumer:
        consumer.commit()
    with start("lag_monitor.py") as monitor:
        monitor.wait_for("sleepers orders/0-1 None")
        assert monitor.end(signal.SIGINT) in INTERRUPTED
    texts = re.findall(r"sleepers (\S+) None (\d+) messages", monitor.output())
    assert sum(int(count) for _, count in texts) == 100


def test_the_newest_and_those_of_a_time_are_found(client: Client, start: Start) -> None:
    """Ten of the newest; all of this hour; a member goes back to its first."""
    sent = publish(client, "orders", 50)
    with start("newest.py") as newest, start("since.py") as since:
        assert newest.end() == since.end() == 0, newest.output() + since.output()
        found = re.findall(r"b'(\d+)'", newest.output())
        assert len(found) == 10
        everything = re.findall(r"b'(\d+)'", since.output())
        assert sorted(map(str.encode, everything)) == sorted(sent)
    with client.consumer("audit", ["orders"]) as consumer:
        consumer.receive_many(50, timeout=WAIT_S, fill=True)
    with start("seek_by_time.py") as audit:
        audit.wait_for(" b'", len(sent))
        assert audit.end(signal.SIGINT) in INTERRUPTED


def test_a_group_goes_back_by_an_hour(client: Client, start: Start) -> None:
    """To its first messages, which are younger."""
    publish(client, "orders", 50)
    with client.consumer("archive", ["orders"]) as consumer:
        consumer.receive_many(50, timeout=WAIT_S, fill=True)
    assert committed(client, "archive") != 0
    with start("back.py") as back:
        assert back.end() == 0, back.output()
    assert back.output().count("->") == 2
    assert committed(client, "archive") == 0


def test_the_test_of_your_code_passes(tmp_path: Path) -> None:
    """As a user runs it, in a directory of its own."""
    (tmp_path / "test_billing.py").write_text(FILES["test_billing.py"])
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-W", "error", "-p", "no:cacheprovider"],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=300,
        cwd=tmp_path,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 passed" in done.stdout
