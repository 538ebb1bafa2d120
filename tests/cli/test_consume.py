"""`metaq consume`: what is printed is what the group has read."""

import contextlib
import io
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from typing import Any

import click
import pytest

from metaq.cli.cluster import Target
from metaq.cli.consume import ConsumeOptions, consume, parse_topic
from metaq.cli.offsets import show_offsets
from metaq.client import Client
from metaq.client.errors import CannotAnswerError
from metaq.errors import ConfigError, NoBrokerError
from tests.brokers import AnyBroker, StartBroker
from tests.cli.runner import assert_ends_without_reader
from tests.rigs.ports import reserved_port
from tests.rigs.waiting import wait_until

PATIENCE_S = 60.0
RECORD_BYTES = 20 + 2


@pytest.fixture
def broker(start_broker: StartBroker) -> AnyBroker:
    made = start_broker()
    made.put(*(b"m%d" % n for n in range(6)))
    return made


@pytest.fixture
def target(broker: AnyBroker) -> Target:
    return Target("memory", "/meta", (), 10.0, broker.coordinator_factory)


def options(
    *,
    count_max: int | None = None,
    idle_s: float | None = PATIENCE_S,
    no_commit: bool = False,
    as_json: bool = False,
    start: str = "earliest",
    metrics_port: int | None = None,
    topic: str = "test",
    where: str | None = None,
    group: str = "g",
) -> ConsumeOptions:
    return ConsumeOptions(
        topic=parse_topic(topic),
        group=group,
        start=start,
        count_max=count_max,
        idle_s=idle_s,
        no_commit=no_commit,
        as_json=as_json,
        metrics_port=metrics_port,
        where=where,
    )


def committed(target: Target, capsys: pytest.CaptureFixture[str]) -> int:
    capsys.readouterr()
    show_offsets(target, "g", "", as_json=True)
    return int(json.loads(capsys.readouterr().out)["committed"])


@pytest.mark.slow
def test_a_group_goes_on_where_it_was(
    target: Target, capsys: pytest.CaptureFixture[str]
) -> None:
    """Printed messages are committed, exactly; the next one prints what follows."""
    consume(target, options(count_max=2))
    assert capsys.readouterr().out == "m0\nm1\n"
    assert committed(target, capsys) == 2 * RECORD_BYTES
    consume(target, options(count_max=4))
    assert capsys.readouterr().out == "m2\nm3\nm4\nm5\n"
    assert committed(target, capsys) == 6 * RECORD_BYTES
    consume(target, options(idle_s=0.0))
    assert capsys.readouterr().out == ""


@pytest.mark.slow
def test_without_commit_the_group_stays_where_it_is(
    target: Target, capsys: pytest.CaptureFixture[str]
) -> None:
    """It begins at the committed offset, and again there the next time."""
    consume(target, options(count_max=1))
    for _ in range(2):
        capsys.readouterr()
        consume(target, options(count_max=2, no_commit=True))
        assert capsys.readouterr().out == "m1\nm2\n"
    assert committed(target, capsys) == RECORD_BYTES


def test_json_says_all_about_a_message(
    target: Target, capsys: pytest.CaptureFixture[str]
) -> None:
    """The same fields as of metaq cat."""
    consume(target, options(count_max=1, as_json=True))
    found = json.loads(capsys.readouterr().out)
    assert (found["topic"], found["offset"], found["data"]) == ("test", 0, "m0")


@pytest.mark.slow
def test_a_condition_is_the_groups(
    broker: AnyBroker, target: Target, capsys: pytest.CaptureFixture[str]
) -> None:
    """The rest is committed past."""
    with Client(**broker.client_options) as client, client.producer() as producer:
        producer.send("test", b"paid", tag="paid")
        producer.send("test", b"void", tag="void")
        end = max(message.next_offset for message in client.browse("test"))
    consume(target, options(where="tag = 'paid'", count_max=1))
    assert capsys.readouterr().out == "paid\n"

    def is_passed() -> bool:
        consume(target, options(where="tag = 'paid'", idle_s=0.1))
        return committed(target, capsys) == end

    wait_until(is_passed)
    consume(target, options(idle_s=0.1))
    assert (capsys.readouterr().out, committed(target, capsys)) == ("", end)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("start", "text"), [("latest", ""), ("2200-01-01", ""), ("2020-01-01", "m0\n")]
)
def test_a_new_group_begins_where_it_is_told(
    broker: AnyBroker,
    target: Target,
    capsys: pytest.CaptureFixture[str],
    start: str,
    text: str,
) -> None:
    """At the end, or at a time, where the broker knows one."""
    if start != "latest" and not broker.has_extensions:
        with pytest.raises(CannotAnswerError, match="no times"):
            consume(target, options(start=start, count_max=1, idle_s=0.3))
        return
    # Without text there is nothing to wait for.
    idle_s = PATIENCE_S if text else 0.3
    consume(target, options(start=start, count_max=1, idle_s=idle_s))
    assert capsys.readouterr().out == text


@pytest.mark.slow
def test_a_pattern_reads_all_topics_that_match_it(
    start_broker: StartBroker, capsys: pytest.CaptureFixture[str]
) -> None:
    """Any of three signs makes a text a pattern; other topics stay unread."""
    broker = start_broker({"orders-a": 1, "orders-b": 1, "logs": 1})
    for topic in ("orders-a", "orders-b", "logs"):
        broker.put(topic.encode(), topic=topic)
    target = Target("memory", "/meta", (), 10.0, broker.coordinator_factory)
    for pattern in ("orders-*", "orders-?", "orders-[ab]"):
        consume(target, options(count_max=2, no_commit=True, topic=pattern))
        lines = capsys.readouterr().out.splitlines()
        assert sorted(lines) == ["orders-a", "orders-b"]
    direct = Target("memory", "/meta", (broker.address,), 10.0)
    consume(direct, options(count_max=2, topic="orders-*"))
    assert sorted(capsys.readouterr().out.splitlines()) == ["orders-a", "orders-b"]


def set_terminal(monkeypatch: pytest.MonkeyPatch, *, is_one: bool) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: is_one)


@pytest.mark.slow
def test_a_pattern_that_no_topic_matches_is_waited_for_and_said(
    target: Target,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """At a terminal: it may be misspelt."""
    set_terminal(monkeypatch, is_one=True)
    consume(target, options(idle_s=0.3, topic="ordres-*"))
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.startswith("metaq: waiting for messages of ordres-* (none yet) as")


def test_a_pattern_that_cannot_be_is_wrong_usage(target: Target) -> None:
    with pytest.raises(click.BadParameter, match="expected text without blanks"):
        parse_topic("orders *")


def test_wrong_names_are_told_before_anything_is_read(target: Target) -> None:
    """A time that is none, a group that cannot be, a topic that no broker serves."""
    with pytest.raises(click.BadParameter, match="2026-01-31T12:00"):
        consume(target, options(start="soon"))
    wrong = ConsumeOptions(
        topic="nope", group="g", start="latest", count_max=1, idle_s=0.0,
        no_commit=False,
        as_json=False,
    )  # fmt: skip
    with pytest.raises(NoBrokerError, match=r"'nope' at the moment; .* test"):
        consume(target, wrong)


@pytest.mark.slow
def test_ctrl_c_commits_and_leaves(
    target: Target, capsys: pytest.CaptureFixture[str]
) -> None:
    """While it waits for more: what was printed is the group's offset."""
    is_printed = threading.Event()

    class Output(io.BytesIO):
        def write(self, data: Any) -> int:
            if b"m5" in bytes(data):
                is_printed.set()
            return super().write(data)

    def interrupt() -> None:
        is_printed.wait(PATIENCE_S)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    try:
        with (
            contextlib.redirect_stdout(io.TextIOWrapper(Output())),
            pytest.raises(KeyboardInterrupt),
        ):
            consume(target, options(idle_s=None))
    finally:
        thread.join()
    assert committed(target, capsys) == 6 * RECORD_BYTES
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_process_with_its_exit_code(
    broker: AnyBroker, number: int
) -> None:
    """128 and the signal's number, without a word."""
    words = ["-m", "metaq", "consume", "test", "--group", "g"]
    child = subprocess.Popen(
        [sys.executable, *words, "--broker", broker.address],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        bufsize=0,
    )
    assert child.stdout is not None
    for known in range(6):
        assert child.stdout.readline() == b"m%d\n" % known
    child.send_signal(number)
    out, err = child.communicate(timeout=PATIENCE_S)
    assert (child.returncode, out, err) == (128 + number, b"", b"")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("has_terminal", "has_group", "text"),
    [
        (
            True,
            True,
            r"metaq: waiting for messages of test as member g\S+_\S+ of group g\S+\n",
        ),
        (
            True,
            False,
            r"metaq: waiting for .* as a reader of all partitions: .* group\n",
        ),
        (False, True, ""),
    ],
)
def test_a_wait_is_announced_at_a_terminal(
    broker: AnyBroker,
    target: Target,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    has_terminal: bool,
    has_group: bool,
    text: str,
) -> None:
    """For what, and as which member; once, and not in the log of a script."""
    set_terminal(monkeypatch, is_one=has_terminal)
    direct = Target("memory", "/meta", (broker.address,), 10.0)
    # On a busy machine the first message may take longer than that.
    for idle_s in (0.5, 4.0, PATIENCE_S):
        each = options(idle_s=idle_s, group=f"g{idle_s:.0f}")
        consume(target if has_group else direct, each)
        shown = capsys.readouterr()
        if shown.out:
            break
    assert shown.out.count("\n") == 6
    assert re.fullmatch(text, shown.err)


@pytest.fixture
def port() -> Iterator[int]:
    with reserved_port() as number:
        yield number


@pytest.mark.slow
def test_a_port_tells_prometheus_what_was_read(
    target: Target, broker: AnyBroker, port: int
) -> None:
    """As long as the command runs; it ends with the seventh message."""
    wanted = options(count_max=7, idle_s=None, metrics_port=port)
    running = threading.Thread(target=consume, args=(target, wanted), daemon=True)
    running.start()
    deadline_s = time.monotonic() + PATIENCE_S
    text = ""
    while 'delivered_messages_total{group="g"} 6.0' not in text:
        assert time.monotonic() < deadline_s, text
        with contextlib.suppress(OSError):
            url = f"http://127.0.0.1:{port}/metrics"
            with urllib.request.urlopen(url, timeout=PATIENCE_S) as page:
                text = page.read().decode()
    with Client(**broker.client_options) as client, client.producer() as producer:
        producer.send("test", b"last")
    running.join(PATIENCE_S)
    assert not running.is_alive()


def test_a_port_that_is_taken_ends_the_command(target: Target) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"metrics port {port}: Address"):
            consume(target, options(metrics_port=port))


@pytest.mark.slow
def test_a_reader_that_goes_away_ends_it_while_no_message_comes(
    broker: AnyBroker,
) -> None:
    """As `| head -1` does: its partitions go to another member."""
    words = ["consume", "test", "--group", "g", "--broker", f"127.0.0.1:{broker.port}"]
    assert_ends_without_reader(words, b"".join(b"m%d\n" % n for n in range(6)))
