"""Environment of an update, and its events; without Spark."""

import json
import os
import threading
import uuid
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from pyspark.sql.connect import proto
from pyspark.sql.streaming.listener import (
    QueryIdleEvent,
    QueryProgressEvent,
    QueryStartedEvent,
    QueryTerminatedEvent,
    StreamingQueryListener,
)

from metaq.pipeline.declared.updates import CONNECT_MODE, ListenerBus, connect_mode

pytestmark = pytest.mark.spark

END_S = 10.0
IDLE = {
    "id": str(uuid.uuid4()),
    "runId": str(uuid.uuid4()),
    "timestamp": "2026-12-01T12:00:00.000Z",
}


class LateEvents:
    """Spark's server, which sends an event once a client removes its listener."""

    def __init__(self) -> None:
        self.removed = threading.Event()

    def execute_command_as_iterator(self, _command: Any) -> Iterator[dict[str, Any]]:
        result = proto.StreamingQueryListenerEventsResult
        name = "streaming_query_listener_events_result"
        yield {name: result(listener_bus_listener_added=True)}
        self.removed.wait(END_S)
        kind = proto.StreamingQueryEventType.QUERY_IDLE_EVENT
        event = proto.StreamingQueryListenerEvent(
            event_type=kind, event_json=json.dumps(IDLE)
        )
        yield {name: result(events=[event])}

    def execute_command(self, _command: Any) -> None:
        self.removed.set()


class Listener(StreamingQueryListener):
    """Counts idle events."""

    count = 0

    def onQueryStarted(self, event: QueryStartedEvent) -> None:  # Spark's name
        raise AssertionError(event)

    def onQueryProgress(self, event: QueryProgressEvent) -> None:  # Spark's name
        raise AssertionError(event)

    def onQueryIdle(self, event: QueryIdleEvent) -> None:  # Spark's name
        assert str(event.id) == IDLE["id"]
        self.count += 1

    def onQueryTerminated(self, event: QueryTerminatedEvent) -> None:  # Spark's name
        raise AssertionError(event)


def test_events_that_come_while_a_listener_is_removed_are_reported() -> None:
    """The bus of a session then waits for ever."""
    streams: Any = SimpleNamespace(_session=SimpleNamespace(client=LateEvents()))
    bus, listener = ListenerBus(streams), Listener()

    def listen() -> None:
        bus.append(listener)
        bus.remove(listener)

    thread = threading.Thread(target=listen, daemon=True)
    thread.start()
    thread.join(END_S)
    assert not thread.is_alive()
    assert listener.count == 1


@pytest.mark.parametrize("before", [None, "0"])
def test_connect_mode_is_as_it_was_behind_an_update(
    before: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A user who has set it finds it set."""
    monkeypatch.delenv(CONNECT_MODE, raising=False)
    if before is not None:
        monkeypatch.setenv(CONNECT_MODE, before)
    with connect_mode():
        assert os.environ[CONNECT_MODE] == "1"
    assert os.environ.get(CONNECT_MODE) == before
