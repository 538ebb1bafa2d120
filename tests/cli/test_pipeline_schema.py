"""`metaq pipeline schema`: messages of a topic in, a schema that fits them out."""

import json
import sys

import pytest

from metaq.pipeline.decode.sample import SAMPLE_BYTES_MAX
from tests.brokers import AnyBroker, StartBroker
from tests.cli.runner import run


@pytest.fixture
def broker(start_broker: StartBroker) -> AnyBroker:
    return start_broker({"t": 2}, broker_id=7)


def fill(broker: AnyBroker, count: int, *, partition: int = 0) -> None:
    texts = [b'{"a": %d}' % number for number in range(count)]
    broker.put(*texts, topic="t", partition=partition)


def test_a_schema_is_proposed_and_what_does_not_fit_is_told(broker: AnyBroker) -> None:
    """Fields and the expression on standard output, sentences beside it."""
    fill(broker, 3)
    broker.put(b"no json", topic="t", partition=1)
    result = run("pipeline", "schema", "t", broker=broker)
    assert result.exit_code == 0
    assert result.stdout == (
        "field\ttype\trequired\tcount\n"
        "a\tBIGINT\tTrue\t3\n"
        "decode.json('a BIGINT NOT NULL')\n"
    )
    assert result.stderr == (
        "metaq: topic t: 4 messages looked at, 3 fit as json\n"
        "metaq: 1 message: no JSON object\n"
    )


def test_machines_get_one_object(broker: AnyBroker) -> None:
    """With counts and errors in it."""
    fill(broker, 2)
    found = json.loads(run("pipeline", "schema", "t", "--json", broker=broker).stdout)
    assert (found["topic"], found["messages"], found["fit"]) == ("t", 2, 2)
    assert found["schema"] == "a BIGINT NOT NULL"


@pytest.mark.parametrize(
    ("counts", "asked", "expected"),
    [((10, 10), 6, 6), ((1, 10), 6, 6), ((10, 1), 6, 4), ((0, 3), 6, 3)],
)
def test_each_partition_has_its_share(
    broker: AnyBroker, counts: tuple[int, int], asked: int, expected: int
) -> None:
    """Never more than was asked for; what one lacks is taken from those behind it."""
    for partition, count in enumerate(counts):
        fill(broker, count, partition=partition)
    words = ("pipeline", "schema", "t", "--count", str(asked), "--json")
    assert json.loads(run(*words, broker=broker).stdout)["messages"] == expected


def test_bytes_are_bounded(broker: AnyBroker) -> None:
    """Whatever the count: messages may be large."""
    text = b'{"a": "%b"}' % (b"x" * (1_000_000 - 9))
    count = -(-SAMPLE_BYTES_MAX // len(text))
    for _ in range(count + 1):
        broker.put(text, topic="t", partition=0)
    result = run("pipeline", "schema", "t", "--json", broker=broker)
    assert json.loads(result.stdout)["messages"] == count


@pytest.mark.parametrize("values", [(), (b"hello", b"\xff")])
def test_where_nothing_fits_the_exit_code_says_so(
    broker: AnyBroker, values: tuple[bytes, ...]
) -> None:
    """No schema is made up."""
    if values:
        broker.put(*values, topic="t")
    result = run("pipeline", "schema", "t", broker=broker)
    assert (result.exit_code, result.stdout) == (1, "")
    assert f"topic t: {len(values)} messages looked at; fewer than" in result.stderr
    machine = run("pipeline", "schema", "t", "--json", broker=broker)
    assert machine.exit_code == 1
    assert json.loads(machine.stdout) == {"topic": "t", "messages": len(values)}


def test_without_spark_one_sentence_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its types are those of the schema."""
    monkeypatch.setitem(sys.modules, "pyspark", None)  # it cannot be imported
    result = run("pipeline", "schema", "t")
    assert result.exit_code == 1
    assert "pip install 'metaq[pipeline]'" in result.output
