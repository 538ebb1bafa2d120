"""`metaq pipeline schema`: messages of a topic in, a schema that fits them out."""

import json
import sys

import pytest

from metaq.cli.pipeline_jobs import SAMPLE_BYTES_MAX, read_sample
from metaq.client import Client
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
        "metaq: topic t: 4 messages sampled, 3 fit as json\n"
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


@pytest.mark.parametrize(("count", "wanted"), [(4, [2, 2]), (6, [2, 4]), (99, [2, 9])])
def test_a_later_partition_has_what_an_earlier_one_lacks(
    broker: AnyBroker, count: int, wanted: list[int]
) -> None:
    """The first messages of each."""
    texts = [[b"%d" % number for number in range(some)] for some in (2, 9)]
    for partition, some in enumerate(texts):
        broker.put(*some, topic="t", partition=partition)
    with Client(**broker.client_options) as client:
        found = read_sample(client, "t", ["7-0", "7-1"], count=count, start="earliest")
    assert found == texts[0][: wanted[0]] + texts[1][: wanted[1]]


@pytest.mark.slow
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
    assert f"topic t: {len(values)} messages sampled; no known format" in result.stderr
    machine = run("pipeline", "schema", "t", "--json", broker=broker)
    assert machine.exit_code == 1
    assert json.loads(machine.stdout) == {"topic": "t", "messages": len(values)}


def test_without_spark_one_sentence_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its types are those of the schema."""
    monkeypatch.setitem(sys.modules, "pyspark", None)  # it cannot be imported
    result = run("pipeline", "schema", "t")
    assert result.exit_code == 1
    assert "pip install 'metaq[pipeline]'" in result.output
