"""`metaq scheduled` and `metaq produce --delay`: what waits, and its end."""

import datetime as dt
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from metaq.cli.cluster import Target
from metaq.cli.main import main
from metaq.cli.produce import ProduceOptions, produce
from metaq.cli.scheduled import DueRange, cancel, list_scheduled
from metaq.client import Client, NoTopicError
from metaq.errors import ConfigError
from metaq.testing.embedded import EmbeddedBroker, embedded_broker

ONE_BROKER = {
    "broker": "MetaQ delivers no message later",
    "target": "likewise",
    "test_times_that_are_none_are_refused": "likewise",
}
AT = dt.datetime(2036, 1, 31, 12, 30, tzinfo=dt.UTC)
ALL = DueRange(since=None, until=None)


@pytest.fixture
def broker() -> Iterator[EmbeddedBroker]:
    far = {"delayMax": "5000*24*3600*1000"}
    with embedded_broker(topics={"orders": 1}, settings=far) as one:
        yield one


@pytest.fixture
def target(broker: EmbeddedBroker) -> Target:
    return Target("memory", "/meta", (), 5.0, broker.coordinator_factory)


def put(target: Target, path: Path, lines: str, **options: Any) -> None:
    path.write_text(lines)
    given = {
        "partition": None, "attribute": None, "key": None, "key_separator": None,
        "headers": (), "delay": None, "deliver_at": None, "expires_in": None,
        "as_json": True, **options,
    }  # fmt: skip
    produce(target, ProduceOptions(topic="orders", file=path, **given))


def listing(
    target: Target, capsys: pytest.CaptureFixture[str], due: DueRange = ALL
) -> Any:
    capsys.readouterr()
    assert list_scheduled(target, "orders", due, 20, as_json=True)
    return json.loads(capsys.readouterr().out)


@pytest.mark.slow
def test_lines_wait_and_are_listed_and_taken_back(
    target: Target, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """By time; what is left stays."""
    put(target, tmp_path / "a", "one\ntwo\n", deliver_at=AT)
    put(target, tmp_path / "b", "three\n", delay="2h", expires_in="1h")
    found = listing(target, capsys)
    assert found["messages"] == 3
    assert found["hours"]["2036-01-31T12:00:00.000Z"] == 2
    assert found["soonest"][-1] == {
        "due": "2036-01-31T12:30:00.000Z",
        "topic": "orders",
        "partition": "0-0",
        "messages": 2,
    }
    assert list_scheduled(target, None, ALL, 20, as_json=False)
    text = capsys.readouterr().out
    assert text.startswith("3 messages, ")
    assert "2036-01-31T12:30:00.000Z" in text
    late = DueRange(since=AT, until=None)
    assert cancel(target, "orders", late, is_dry=True, is_sure=False, as_json=True)
    assert listing(target, capsys)["messages"] == 3
    assert cancel(target, "orders", late, is_dry=False, is_sure=True, as_json=True)
    assert "2 messages cancelled" in capsys.readouterr().err
    assert listing(target, capsys, late)["messages"] == 0
    assert listing(target, capsys)["messages"] == 1
    # Nothing is asked where nothing waits.
    assert cancel(target, "orders", late, is_dry=False, is_sure=False, as_json=True)
    with pytest.raises(NoTopicError, match="no broker has topic 'order'"):
        cancel(target, "order", late, is_dry=False, is_sure=True, as_json=True)


@pytest.mark.slow
def test_times_that_are_none_are_refused(
    broker: EmbeddedBroker, target: Target, tmp_path: Path
) -> None:
    """In one sentence, and nothing is sent."""
    path = tmp_path / "a"
    path.write_text("x\n")
    for words, hint in (
        (["--delay", "1h", "--at", "2036-01-31"], "exclude each other"),
        (["--at", "soon"], "expected a time such as"),
    ):
        result = CliRunner().invoke(main, ["produce", "t", *words])
        assert result.exit_code == 2
        assert hint in result.stderr
    for option in ("delay", "expires_in"):
        with pytest.raises(ConfigError, match=f"{option}: expected a time such as"):
            put(target, path, "x\n", **{option: "soon"})
    assert target.ask(lambda admin: admin.scheduled()).message_count == 0
    with Client(**broker.client_options) as client:
        assert list(client.browse("orders")) == []
