"""The checker of the matrix finds what it is there to find."""

import pytest

from metaq.model import BrokerId, Message, MessageId, Offset, TopicPartition
from tests.matrix.ledger import Event, Ledger, check, readers

P = TopicPartition("t", BrokerId(0), 0)


def event(text: str) -> Event:
    """Return the event that `kind member [begin [end]]` says."""
    kind, member, *numbers = text.split()
    return Event(kind, member, P, *map(int, numbers))


def violations(*texts: str, forced: tuple[str, ...] = ()) -> list[str]:
    """Return what is found in these events."""
    ledger = Ledger([event(text) for text in texts])
    return check(ledger, tried=(), acked=(), forced=forced)


CLEAN = (
    ("assign a", "deliver a 0 5", "deliver a 5 9", "commit a 9"),
    ("assign a", "deliver a 0 5", "revoke a", "assign b", "deliver b 5 9"),
    # Unclean ends allow what was not committed to come again, to others.
    ("assign a", "deliver a 0 5", "fence a", "assign b", "deliver b 0 9"),
    ("assign a", "deliver a 0 5", "commit a 3", "fence a", "assign b", "deliver b 3 9"),
    ("assign a", "deliver a 0 5", "refused a", "revoke a", "assign b", "deliver b 0 9"),
    # The batch that was on its way when the partition went.
    ("assign a", "fence a", "deliver a 0 5", "assign b", "deliver b 0 9"),
    # Back again: what it has handled is passed over, what was being handled is not.
    (
        "assign a",
        "deliver a 0 5",
        "deliver a 5 9",
        "fence a",
        "assign b",
        "deliver b 0 3",
        "revoke b",
        "assign a",
        "deliver a 5 12",
    ),
)

BROKEN = (
    (
        "4 to 5, got 3",
        (
            "assign a",
            "deliver a 0 5",
            "commit a 4",
            "fence a",
            "assign b",
            "revoke b",
            "assign c",
            "deliver c 3 9",
        ),
    ),
    ("while a reads", ("assign a", "assign b")),
    ("expected 5, got 6", ("assign a", "deliver a 0 5", "deliver a 6 9")),
    ("expected 5, got 4", ("assign a", "deliver a 0 5", "deliver a 4 9")),
    ("0 to 0, got 1", ("assign a", "deliver a 1 5")),
    (
        "5 to 5, got 0",
        ("assign a", "deliver a 0 5", "revoke a", "assign b", "deliver b 0 9"),
    ),
    (
        "4 to 5, got 3",
        (
            "assign a",
            "deliver a 0 5",
            "commit a 4",
            "fence a",
            "assign b",
            "deliver b 3 9",
        ),
    ),
    (
        "after its end",
        ("assign a", "deliver a 0 5", "revoke a", "deliver a 5 9"),
    ),
    (
        "after its end",
        ("assign a", "fence a", "assign b", "deliver a 0 5", "deliver a 5 9"),
    ),
    (
        "this very client",
        (
            "assign a",
            "deliver a 0 5",
            "deliver a 5 9",
            "fence a",
            "assign a",
            "deliver a 0 9",
        ),
    ),
    ("went from 4 to 2", ("assign a", "commit a 4", "commit a 2")),
)


@pytest.mark.parametrize("texts", CLEAN)
def test_what_is_allowed_is_not_blamed(texts: tuple[str, ...]) -> None:
    """At least once, in order, one reader: all of it may happen."""
    assert violations(*texts) == []


@pytest.mark.parametrize(("text", "texts"), BROKEN)
def test_what_is_not_allowed_is_blamed(text: str, texts: tuple[str, ...]) -> None:
    """Each rule has a history that breaks it alone."""
    found = violations(*texts)
    assert len(found) == 1
    assert text in found[0]


def test_who_lost_a_session_by_force_goes_on_until_it_knows() -> None:
    """Others may begin before that; afterwards it is held to the rules again."""
    texts = (
        "assign a",
        "deliver a 0 5",
        "assign b",
        "deliver a 5 7",
        "deliver b 0 5",
        "deliver a 7 9",
        "fence a",
    )
    assert violations(*texts, forced=("a",)) == []
    assert len(violations(*texts)) > 1
    late = ("deliver a 9 10", "deliver a 10 11")
    assert len(violations(*texts, *late, forced=("a",))) == 1


def message(data: bytes, offset: int) -> Message:
    return Message(
        "t", data, None, MessageId(1), P, Offset(offset), Offset(offset + 10)
    )


def test_losses_phantoms_and_doubles_are_found() -> None:
    """Payloads are compared with what the sender knows."""
    ledger = Ledger([event("assign a")])
    ledger.deliver("a", [message(b"x", 0), message(b"y", 10), message(b"x", 20)])
    found = check(ledger, tried=[b"x", b"z"], acked=[b"z"])
    assert found == [
        "1 acknowledged lost, first b'z'",
        "never sent: b'y'",
        "stored twice: b'x'",
    ]
    assert ledger.repeat_count == 0


def test_a_gap_within_a_batch_is_found() -> None:
    """Messages that were handed out together follow each other too."""
    ledger = Ledger([event("assign a")])
    ledger.deliver("a", [message(b"x", 0), message(b"y", 20)])
    assert len(check(ledger, tried=[b"x", b"y"], acked=())) == 1


def test_readers_are_those_who_were_not_ended() -> None:
    """An end by force changes nothing."""
    events = [event(text) for text in ("assign a", "revoke b")]
    assert readers(events) == {P: "a"}
    events.append(event("fence a"))
    assert readers(events) == {}
