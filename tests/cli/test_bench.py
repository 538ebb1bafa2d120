"""`metaq bench`: the figures are there, and are what they are called."""

import json
import threading
from pathlib import Path
from typing import Any

import pytest

from metaq.cli import bench
from metaq.cli.bench import (
    bench_consume,
    bench_latency,
    bench_produce,
    percentile_of,
    rates,
)
from metaq.cli.cluster import Target
from metaq.client import Client, Consumer, Producer
from metaq.errors import MetaqError, RequestTimeoutError
from metaq.testing.embedded import embedded_broker
from metaq.testing.fake_broker import FaultKind
from tests.brokers import AnyBroker, StartBroker

ONE_BROKER = {
    "test_a_topic_that_takes_no_puts_is_told_as_that": "a setting of ours",
    "test_a_refusal_is_told_in_place_of_what_did_not_come": "it refuses on cue",
}


@pytest.fixture
def broker(start_broker: StartBroker) -> AnyBroker:
    return start_broker({"test": 2})


@pytest.fixture
def target(broker: AnyBroker) -> Target:
    return Target("memory", "/meta", (), 10.0, broker.coordinator_factory)


def consume(target: Target, *, count: int) -> None:
    bench_consume(target, "test", count=count, as_json=True)


def latency(
    target: Target, *, count: int, size_bytes: int = 100, rate: float = 2000
) -> None:
    how: Any = {"size_bytes": size_bytes, "rate": rate, "as_json": True}
    bench_latency(target, "test", count=count, **how)


def figures(capsys: pytest.CaptureFixture[str]) -> dict[str, float]:
    lines = map(json.loads, capsys.readouterr().out.splitlines())
    return {line["figure"]: line["value"] for line in lines}


@pytest.mark.slow
def test_each_part_measures_what_it_says(
    broker: AnyBroker, target: Target, capsys: pytest.CaptureFixture[str]
) -> None:
    """Messages are stored, read back, and timed; one more opens the connections."""
    bench_produce(target, "test", count=50, size_bytes=100, as_json=True)
    found = figures(capsys)
    assert found["messages"] == 50
    assert found["messages_per_s"] > 0
    assert found["list_p50_ms"] <= found["list_p100_ms"]
    consume(target, count=50)
    assert figures(capsys)["messages"] >= 50
    latency(target, count=40, size_bytes=10)
    found = figures(capsys)
    assert found["messages"] == 40
    assert 0 < found["p50_ms"] <= found["p99_ms"] <= found["p100_ms"]
    with Client(**broker.client_options) as client:
        sizes = [len(message.data) for message in client.browse("test")]
    assert sorted(sizes) == [24] * 40 + [100] * 51


@pytest.mark.slow
def test_messages_that_are_not_there_are_told(broker: AnyBroker) -> None:
    """Reading more than there is ends, and says why."""
    target = Target("memory", "/meta", (), 0.3, broker.coordinator_factory)
    with pytest.raises(RequestTimeoutError, match=r"no message arrived within 0\.3 s"):
        consume(target, count=1_000_000)
    broker.put(b"1", b"2")
    text = r"0\.3 s; the topic has 2 of 1,000,000 messages: use a smaller --count"
    with pytest.raises(RequestTimeoutError, match=text):
        consume(target, count=1_000_000)


@pytest.mark.slow
def test_all_that_is_counted_is_timed(
    broker: AnyBroker, target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Messages that came with the first one would count as read in no time."""
    broker.put(*[b"x" * 1024] * 64)
    moments, fetched = [], []
    read = Consumer.receive_many

    def receive_many(consumer: Consumer, *words: Any) -> Any:
        fetched.append(consumer)
        return read(consumer, *words)

    def rates(*found: Any) -> list[tuple[str, float, str]]:
        moments.append(found)
        return []

    monkeypatch.setattr(Consumer, "receive_many", receive_many)
    monkeypatch.setattr(bench, "rates", rates)
    consume(target, count=64)
    assert [(count, size) for count, size, _seconds in moments] == [(64, 64 * 1024)]
    # The consumer that opened the connections hands out nothing that is counted.
    assert fetched[0] is not fetched[1]


@pytest.mark.slow
def test_the_first_message_is_due_when_the_topic_is_known(
    target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise the highest percentiles would measure ZooKeeper."""
    calls = []

    def recording(name: str) -> Any:
        original = getattr(Producer, name)

        def call(*words: Any, **options: Any) -> Any:
            calls.append(name)
            return original(*words, **options)

        return call

    for name in ("prepare", "send_nowait"):
        monkeypatch.setattr(Producer, name, recording(name))
    latency(target, count=3)
    assert calls == ["prepare", *["send_nowait"] * 3]


def test_figures_have_the_digits_that_they_are_worth() -> None:
    """A small figure is not shown as zero."""
    assert bench.rounded(0.000021507) == 0.00002151
    assert bench.rounded(170.1864) == 170.2
    assert bench.rounded(4739786.4) == 4739786
    assert bench.rounded(124) == 124


def latency_error(text: str, broker: Any, **wanted: Any) -> MetaqError:
    """Return the error that says so; other things may take longer than a short time."""
    for timeout_s in (0.3, 1.2, 5.0, 20.0):
        target = Target("memory", "/meta", (), timeout_s, broker.coordinator_factory)
        with pytest.raises(MetaqError) as caught:
            latency(target, **wanted)
        if text in str(caught.value):
            break
    assert text in str(caught.value)
    return caught.value


@pytest.mark.slow
def test_what_ends_the_reading_ends_the_sending(broker: AnyBroker) -> None:
    """An error or Ctrl-C does not wait for an hour of messages that are not due yet."""
    error = latency_error("no message arrived within", broker, count=36, rate=0.01)
    assert isinstance(error, RequestTimeoutError)
    assert not [each for each in threading.enumerate() if each.name == "metaq-bench"]


@pytest.mark.slow
def test_a_topic_that_takes_no_puts_is_told_as_that(tmp_path: Path) -> None:
    """The sending is on a thread of its own, whose errors would be lost."""
    settings = {"test:acceptPublish": "false"}
    with embedded_broker(data_path=tmp_path, settings=settings) as broker:
        text = "no broker takes puts to topic 'test'"
        assert latency_error(text, broker, count=5)


@pytest.mark.slow
def test_a_refusal_is_told_in_place_of_what_did_not_come(
    start_metaq_1_4: StartBroker,
) -> None:
    """The reason, in the broker's words."""
    broker: Any = start_metaq_1_4({"test": 1})
    broker.inner.inject(FaultKind.REFUSE, count=1000, body=b"no room")
    assert latency_error("no room", broker, count=5)


@pytest.mark.parametrize(
    ("percentile", "value"), [(1.0, 1), (50.0, 5), (90.0, 9), (99.9, 10), (100.0, 10)]
)
def test_percentiles_are_values_that_were_measured(
    percentile: float, value: float
) -> None:
    """The nearest rank, never in between."""
    assert percentile_of(list(map(float, range(1, 11))), percentile) == value


def test_rates_are_per_second() -> None:
    """Also of what took no time that can be measured."""
    found = {name: value for name, value, _unit in rates(10, 2**21, 2.0)}
    assert found["messages_per_s"] == 5
    assert found["mib_per_s"] == 1
    assert rates(1, 1, 0.0)[2][1] > 0
