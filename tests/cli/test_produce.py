"""`metaq produce`: lines become messages, and the summary is true."""

import io
import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click.testing
import pytest
from hypothesis import given
from hypothesis import strategies as st

from metaq.cli.cluster import Target, find_topic
from metaq.cli.interrupts import Interrupts
from metaq.cli.produce import (
    CHUNK_BYTES,
    PIECE_BYTES_MIN,
    STANDARD_INPUT,
    ProduceOptions,
    iter_lines,
    open_input,
    piece_bytes,
    produce,
)
from metaq.client import Client
from metaq.client.options import MIB
from metaq.errors import ClientError, NoBrokerError
from metaq.protocol.commands import Mput, Result
from metaq.testing.fake_broker import FaultKind
from tests.brokers import AnyBroker, StartBroker
from tests.cli.runner import run
from tests.client.memory_broker import MemoryBroker

LINES = [b"first", b"", b"with CR\r", b"\xff\x00 binary", b"last"]


ONE_BROKER = {
    "MemoryBroker": "batches are lost, refused and not answered on cue",
    "java": "the same to single puts",
}


@pytest.fixture
def broker(start_broker: StartBroker) -> AnyBroker:
    return start_broker({"t": 2}, broker_id=7)


@pytest.fixture
def java(start_metaq_1_4: StartBroker) -> Any:
    return start_metaq_1_4({"t": 2}, broker_id=7)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "lines"
    path.write_bytes(b"\n".join(LINES))
    return path


@given(
    data=st.binary(max_size=200),
    sizes=st.lists(st.integers(min_value=1, max_value=30), min_size=1),
)
def test_however_it_is_read_the_lines_are_the_same(
    data: bytes, sizes: list[int]
) -> None:
    """Any chunking gives the lines; joined by LF they are the input."""
    data = data.replace(b"a", b"\n")
    stream = io.BytesIO(data)
    turn = iter(sizes * (len(data) + 1))
    lines = [n for ls in iter_lines(lambda _size: stream.read(next(turn))) for n in ls]
    wanted = data.split(b"\n")
    assert lines == (wanted if wanted[-1] else wanted[:-1])


def test_a_file_without_lines_is_refused() -> None:
    """Input that never ends with LF does not fill the memory."""
    stream = io.BytesIO(b"ok\n" + bytes(100))
    with pytest.raises(ClientError, match="line 2 is longer than 50 bytes"):
        list(iter_lines(lambda _size: stream.read(20), line_bytes_max=50))


def test_every_byte_of_a_line_arrives(file: Path, broker: AnyBroker) -> None:
    """CR, NUL and bytes that are no text are kept; LF is not part of a line."""
    result = run(
        "produce", "t", "--file", str(file), "--partition", "7-1", broker=broker
    )
    assert result.exit_code == 0, result.output
    broker.assert_stored(LINES, "t", 1)
    assert result.stdout.startswith("5 messages, 26 B in ")
    assert "partitions 7-1: 5" in result.stdout
    assert result.stderr == ""


@pytest.mark.slow
def test_chunks_go_round_the_partitions(broker: AnyBroker, tmp_path: Path) -> None:
    """Lines read at once stay together; the next go to the next partition."""
    path = tmp_path / "lines"
    path.write_bytes((b"x" * (CHUNK_BYTES // 8 - 1) + b"\n") * 32)
    result = run("produce", "t", "--file", str(path), broker=broker)
    assert result.exit_code == 0, result.output
    assert [len(broker.stored("t", p)) for p in (0, 1)] == [16, 16]


@pytest.mark.slow
def test_a_small_file_is_spread_over_the_partitions(
    broker: AnyBroker, tmp_path: Path
) -> None:
    """It is far smaller than a batch, and still does not go to one partition."""
    path = tmp_path / "lines"
    lines = [b"line %06d" % number for number in range(2_000)]
    path.write_bytes(b"\n".join(lines))
    result = run("produce", "t", "--file", str(path), broker=broker)
    assert result.exit_code == 0, result.output
    counts = [len(broker.stored("t", p)) for p in (0, 1)]
    assert sum(counts) == len(lines)
    assert min(counts) > len(lines) // 4
    if broker.has_extensions:  # MetaQ 1.4 keeps no order among puts in flight
        for partition in (0, 1):
            stored = broker.stored("t", partition)
            assert stored == sorted(stored)


def test_pieces_are_no_larger_than_a_batch_and_not_tiny() -> None:
    """A share of a file for each partition, within these bounds; a pipe has no size."""
    assert piece_bytes(100_000, 4) == 25_000
    assert piece_bytes(100_000_000, 4) == MIB
    assert piece_bytes(100, 4) == PIECE_BYTES_MIN
    assert piece_bytes(0, 4) == piece_bytes(100, 1) == MIB


def test_the_summary_is_json_on_request(file: Path, broker: AnyBroker) -> None:
    """Counts, bytes, time, rate, and what has no outcome."""
    words = ["produce", "t", "--file", str(file), "--partition", "0", "--json"]
    result = run(*words, broker=broker)
    summary = json.loads(result.stdout)
    assert summary.pop("seconds") >= 0
    assert summary.pop("messages_per_s") > 0
    assert summary == {
        "messages": 5,
        "bytes": 26,
        "partitions": {"7-0": 5},
        "may_be_doubled": 0,
        "refused": 0,
        "in_doubt": 0,
    }


def test_an_attribute_goes_with_every_message(file: Path, broker: AnyBroker) -> None:
    """The payload carries the attribute block, and cat takes it off again."""
    words = ["--file", str(file), "--partition", "0", "--attribute", "blue"]
    assert run("produce", "t", *words, broker=broker).exit_code == 0
    result = run("cat", "t", "--json", broker=broker)
    messages = [json.loads(line) for line in result.stdout.splitlines()]
    assert {m["attribute"] for m in messages} == {"blue"}
    assert "first" in {m["data"] for m in messages}


@pytest.mark.slow
def test_lines_that_may_be_doubled_are_admitted(file: Path) -> None:
    """After a break the summary says how many were sent twice."""
    with MemoryBroker() as broker:
        seen: list[object] = []

        def hang_up_once(command: object) -> bool:
            if isinstance(command, Mput):
                seen.append(command)
            return isinstance(command, Mput) and len(seen) == 1

        broker.hang_up = hang_up_once
        result = run("produce", "t", "--file", str(file), broker=broker)
        assert result.exit_code == 0
        assert "4 lines may be stored twice" in result.stderr


def run_until_said(
    text: str,
    *words: str,
    broker: AnyBroker | MemoryBroker,
    begin: Callable[[], None] = lambda: None,
) -> click.testing.Result:
    """Send with a short time; with a longer one if it ended before that was said."""
    timeout_s = 0.4
    while True:
        begin()
        result = run("produce", "t", *words, "--timeout", str(timeout_s), broker=broker)
        timeout_s *= 2
        if text in result.stderr or timeout_s > 30:
            return result


@pytest.mark.slow
def test_lines_without_an_answer_are_counted(
    file: Path,
) -> None:
    """A broker that falls silent: exit code 1, and how many are unknown."""
    file.write_bytes(b"line\n" * 5)
    with MemoryBroker() as broker:
        broker.stay_silent = lambda command: isinstance(command, Mput)
        text = "5 lines in doubt: sent, but possibly not stored"
        result = run_until_said(text, "--file", str(file), broker=broker)
        assert result.exit_code == 1
        assert text in result.stderr
        assert result.stderr.count("metaq: ") == 2


@pytest.mark.slow
def test_a_refusal_is_told_in_the_brokers_words(file: Path) -> None:
    """A closed partition: exit code 1 and the reason."""
    with MemoryBroker() as broker:
        broker.refuse = lambda command: (
            Result(403, b"partition[7-0] has been closed", command.opaque)
            if isinstance(command, Mput)
            else None
        )
        text = "metaq: partition[7-0] has been closed\n"
        result = run_until_said(text, "--file", str(file), broker=broker)
        assert result.exit_code == 1
        assert result.stderr.endswith(text)


def test_a_line_that_is_too_large_is_named_by_its_number(file: Path) -> None:
    """Its text does not identify it."""
    big = 2 * 1024 * 1024
    file.write_bytes(b"1\n2\n" + bytes(big) + b"\n4\n")
    with MemoryBroker() as broker:
        result = run("produce", "t", "--file", str(file), broker=broker)
    assert result.exit_code == 1
    assert "metaq: line 3: message: t/7-" in result.stderr
    assert result.stderr.endswith(f" takes at most 1048576 bytes, got {big}\n")


def test_a_file_that_cannot_be_read_is_named() -> None:
    """Also when that shows only after it was opened."""
    with MemoryBroker() as broker:
        result = run("produce", "t", "--file", "/proc/self/mem", broker=broker)
    assert result.exit_code == 1
    assert result.stderr == "metaq: /proc/self/mem: Input/output error\n"


def test_ctrl_c_ends_the_wait_for_the_writer_of_a_pipe(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The system waits in `open` until a writer opens it, maybe for ever."""
    seen: list[str] = []

    def wait_for_writer(*_arguments: object) -> int:
        os.kill(os.getpid(), signal.SIGINT)
        seen.append("goes on waiting")
        return os.dup(STANDARD_INPUT)

    monkeypatch.setattr(os, "open", wait_for_writer)
    with (
        Interrupts() as interrupts,
        pytest.raises(KeyboardInterrupt),
        open_input(tmp_path / "pipe", interrupts),
        interrupts.pause(),
    ):
        seen.append("reads")
    assert seen == []


@pytest.mark.slow
def test_lines_stored_around_a_refusal_are_not_called_unknown(file: Path) -> None:
    """A refusal in the middle: so many stored, so many refused, and none unknown."""
    file.write_bytes(b"line\n" * 450)
    with MemoryBroker() as broker:
        broker.refuse = lambda command: (
            Result(500, b"low on space", command.opaque)
            if isinstance(command, Mput) and command.sequence == 100
            else None
        )
        words = ["--file", str(file), "--partition", "7-0"]
        result = run("produce", "t", *words, broker=broker)
        assert result.exit_code == 1
        assert result.stdout.startswith("350 messages, ")
        assert "100 lines not stored" in result.stderr
        assert "in doubt" not in result.stderr
        assert result.stderr.endswith("metaq: low on space\n")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "count", "exit_code", "text"),
    [
        (FaultKind.DROP_STORED, 1, 0, "lines may be stored twice"),
        (FaultKind.SWALLOW, 1000, 1, "4 lines in doubt: sent, but possibly not stored"),
        (FaultKind.REFUSE, 1000, 1, "metaq: no room"),
    ],
)
def test_what_became_of_the_lines_of_a_metaq_1_4_broker_is_told(
    java: Any, file: Path, kind: FaultKind, count: int, exit_code: int, text: str
) -> None:
    """Each has an outcome of its own; the last one, without LF, is sent after them."""

    def inject() -> None:
        java.inner.inject(kind, count=count, body=b"no room")

    words = ["--file", str(file), "--partition", "7-0"]
    result = run_until_said(text, *words, broker=java, begin=inject)
    assert result.exit_code == exit_code
    assert text in result.stderr
    wanted = LINES if kind is FaultKind.DROP_STORED else []
    assert set(java.stored("t")) == set(wanted)


@pytest.mark.parametrize("partition", ["9", "7-9"])
def test_a_partition_that_does_not_exist_is_wrong_usage(
    file: Path, broker: AnyBroker, partition: str
) -> None:
    """Those that exist are listed."""
    words = ["--file", str(file), "--partition", partition]
    result = run("produce", "t", *words, broker=broker)
    assert result.exit_code == 2
    assert "7-0, 7-1" in " ".join(result.stderr.split())


def test_an_unknown_topic_is_told(file: Path, broker: AnyBroker) -> None:
    """The topics that there are are named."""
    result = run("produce", "nope", "--file", str(file), broker=broker)
    assert result.exit_code == 1
    assert "'nope'" in result.stderr


@pytest.mark.slow
def test_a_topic_that_a_pattern_admits_gets_its_first_message(
    file: Path, start_broker: StartBroker, capsys: pytest.CaptureFixture[str]
) -> None:
    """ZooKeeper knows it only after a first put."""
    broker = start_broker({"wild-*": 1})
    target = Target("memory", "/meta", (), 10.0, broker.coordinator_factory)
    options = ProduceOptions(
        topic="wild-one",
        file=file,
        partition=None,
        attribute=None,
        key=None,
        key_separator=None,
        headers=(),
        delay=None,
        deliver_at=None,
        expires_in=None,
        as_json=True,
    )
    produce(target, options)
    assert json.loads(capsys.readouterr().out)["messages"] == len(LINES)
    with Client(brokers=[broker.address]) as client:
        assert sorted(m.data for m in client.browse("wild-one")) == sorted(LINES)
    with pytest.raises(NoBrokerError, match=r"'tame' at the moment; .* wild-"):
        find_topic(target, "tame", (), kind="puts")


def test_lines_have_key_and_headers(tmp_path: Path, broker: AnyBroker) -> None:
    """One key for all, or the start of each line; and `cat --json` shows them."""
    path = tmp_path / "lines"
    path.write_bytes(b"k1;first;1\nplain\n\xff;third\n")
    header = ("--header", "trace=a=b", "--header", "empty=")
    separated = ("--key-separator", ";", *header, "--tag", "paid")
    for more in (separated, ("--key", "all")):
        result = run("produce", "t", "--file", str(path), *more, broker=broker)
        assert result.exit_code == 0, result.stderr
    printed = run("cat", "t", "--json", broker=broker).stdout
    shown = [json.loads(line) for line in printed.splitlines()]
    pairs = [("trace", "a=b"), ("empty", ""), ("tag", "paid")]
    headers = [{"name": n, "value": v, "value_base64": None} for n, v in pairs]
    first = [one for one in shown if one["headers"]]
    assert all(one["headers"] == headers for one in first)
    assert {(o["key"], o["key_base64"], o["data"]) for o in first} == {
        ("k1", None, "first;1"),
        (None, None, "plain"),
        (None, "/w==", "third"),
    }
    rest = [one for one in shown if not one["headers"]]
    assert {one["key"] for one in rest} == {"all"}
    assert len({one["partition"] for one in rest}) == 1
    assert len(rest) == 3


def test_a_separator_may_be_any_bytes(tmp_path: Path, broker: AnyBroker) -> None:
    """Those of the command line that are not UTF-8 arrive as surrogates."""
    path = tmp_path / "lines"
    path.write_bytes(b"k1\xffdata\n")
    separator = ("--key-separator", os.fsdecode(b"\xff"))
    result = run("produce", "t", "--file", str(path), *separator, broker=broker)
    assert result.exit_code == 0, result.stderr
    with Client(brokers=[broker.address]) as client:
        assert [(m.key, m.data) for m in client.browse("t")] == [(b"k1", b"data")]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("--header", "trace"), "expected NAME=VALUE, got 'trace'"),
        (("--header", "=x"), "expected NAME=VALUE, got '=x'"),
        (("--key", "a", "--key-separator", ";"), "exclude each other"),
        (("--key-separator", ""), "expected a text, got an empty one"),
    ],
)
def test_wrong_keys_and_headers_are_usage_errors(
    file: Path, broker: AnyBroker, arguments: tuple[str, ...], text: str
) -> None:
    """Nothing is sent."""
    result = run("produce", "t", "--file", str(file), *arguments, broker=broker)
    assert result.exit_code == 2
    assert text in result.stderr
    assert run("cat", "t", broker=broker).stdout == ""
