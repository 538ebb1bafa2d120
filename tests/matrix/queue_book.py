"""Book of a queue group: what was put, handed out, said and told.

It is a file of JSON lines, to which every process appends what it does in the moment in
which it does it, so the file has the order of the events and outlives its writers. What
has to hold:

* what was acknowledged is never handed out again
* each acknowledged put is done, or one dead letter
* a message is a dead letter only if it was rejected, or handed out too often
* a message of a key is handed out when every earlier one of it is settled, and then no
  earlier one is handed out again, unless an answer was still out
* a lease is said to be lost only if another delivery had the message
"""

import json
import math
import os
import time
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Self

FINAL = {"ack", "reject"}
"""Verbs after which a message is not handed out again."""


class Place(NamedTuple):
    """Partition and offset of a message."""

    partition: str
    offset: int

    @classmethod
    def of(cls, message: Any) -> Self:
        """Return that of a message or a receipt of one."""
        return cls(message.partition.name, message.offset)


@dataclass
class Book:
    """The file; opened by each process for itself."""

    path: Path

    def __post_init__(self) -> None:
        self._fd = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)

    def note(self, event: str, **fields: object) -> None:
        """Append an event; one write, so lines of several processes stay whole."""
        line = {"at": time.monotonic(), "event": event, **fields}
        os.write(self._fd, json.dumps(line).encode() + b"\n")

    def read(self) -> list[dict[str, Any]]:
        """Return the events so far."""
        return [json.loads(line) for line in self.path.read_text().splitlines()]

    def close(self) -> None:
        """Append no more."""
        os.close(self._fd)


class _Message:
    """State of one message in the middle of the book."""

    def __init__(self) -> None:
        self.data = ""
        self.key: str | None = None
        self.deliveries = set[int]()
        self.count = 0
        """Highest count that a worker was told."""
        self.said = set[str]()
        self.acked_s = math.inf
        """Monotonic time at which the first ack was answered."""

    def is_over(self, deliveries_max: int) -> bool:
        """Return whether it was settled for good, or may be a dead letter by now."""
        return bool(self.said & FINAL) or self.count >= deliveries_max


def check(
    events: Iterable[dict[str, Any]],
    letters: Iterable[tuple[Place, str]],
    deliveries_max: int,
    *,
    is_ordered: bool = False,
) -> list[str]:
    """Return what happened and may not happen.

    Args:
        events: of the book.
        letters: origin and cause of each dead letter.
        deliveries_max: of the group.
        is_ordered: its messages are ordered by key.
    """
    found, lost = list[str](), list[tuple[Place, int]]()
    puts = set[Place]()
    messages: dict[Place, _Message] = defaultdict(_Message)
    keys: dict[tuple[str, str], dict[int, _Message]] = defaultdict(dict)
    for event in events:
        if "place" not in event:
            continue
        place = Place(*event["place"])
        message = messages[place]
        match event["event"]:
            case "put":
                puts.add(place)
            case "took":
                if event["begun"] > message.acked_s:
                    found.append(f"handed out after its ack was answered: {event}")
                message.data, message.key = event["data"], event["key"]
                message.deliveries.add(event["delivery"])
                message.count = max(message.count, event["count"])
                if is_ordered and message.key is not None:
                    of_key = keys[place.partition, message.key]
                    of_key[place.offset] = message
                    found += [
                        f"handed out, and offset {offset} of its key is not settled:"
                        f" {event}"
                        for offset, one in of_key.items()
                        if offset < place.offset and not one.is_over(deliveries_max)
                    ]
                    if not message.is_over(deliveries_max) and place.offset < max(
                        of_key
                    ):
                        found.append(f"handed out after a later one: {event}")
            case "said":
                message.said.add(event["verb"])
            case "told" if event["verb"] == "ack" and not event["error"]:
                message.acked_s = min(message.acked_s, event["at"])
            case "told" if event["error"] == "LeaseLostError":
                lost.append((place, event["delivery"]))
    counts = Counter(place for place, _cause in letters)
    for place, cause in letters:
        message = messages[place]
        is_due = message.count >= deliveries_max
        if not ("reject" in message.said if cause == "rejected" else is_due):
            found.append(f"a dead letter, without a reason: {place} {message.data}")
    found += [f"{n} dead letters: {place}" for place, n in counts.items() if n > 1]
    found += [
        f"neither done nor a dead letter: {place} {messages[place].data}"
        for place in puts
        if place not in counts and "ack" not in messages[place].said
    ]
    found += [
        f"lost, and no other delivery had it: {place}, delivery {delivery}"
        for place, delivery in lost
        if messages[place].deliveries == {delivery} and place not in counts
    ]
    return found
