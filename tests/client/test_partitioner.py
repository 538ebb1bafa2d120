"""Selectors: turns, and the partition of a key when brokers come and go."""

import subprocess
import sys
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from metaq.client.partitioner import (
    KEY_SLOTS,
    KeyHash,
    OutgoingMessage,
    Pinned,
    RoundRobin,
    parse_partition,
    plan_slots,
    slot_of,
    slots_of,
)
from metaq.errors import ConfigError, NoBrokerError
from metaq.model import BrokerId, TopicPartition

MESSAGE = OutgoingMessage(b"")


def parts(*names: str) -> tuple[TopicPartition, ...]:
    return tuple(parse_partition("t", name) for name in names)


def test_round_robin_begins_with_the_second_partition() -> None:
    """As MetaQ's clients do (docs/metaq-1.4/client.md 7.2), for all topics together."""
    choose = RoundRobin()
    three = parts("0-0", "0-1", "1-0")
    picked = [str(choose("t", three, MESSAGE)) for _ in range(4)]
    assert picked == ["t/0-1", "t/1-0", "t/0-0", "t/0-1"]
    assert choose("u", parts("5-0"), MESSAGE) == parts("5-0")[0]


@pytest.mark.slow
@given(
    names=st.sets(
        st.tuples(st.integers(0, 20), st.integers(0, 9)), min_size=2, max_size=12
    ),
    keys=st.lists(st.binary(max_size=12) | st.text(max_size=12), max_size=40),
    data=st.data(),
)
def test_only_keys_of_a_vanished_partition_move(
    names: set[tuple[int, int]], keys: list[str | bytes], data: st.DataObject
) -> None:
    """Without one partition, every key that was elsewhere stays where it was."""
    full = tuple(TopicPartition("t", BrokerId(b), p) for b, p in sorted(names))
    gone = data.draw(st.sampled_from(full))
    left = tuple(p for p in full if p != gone)
    choose = KeyHash()
    before = [choose("t", full, OutgoingMessage(b"", key=key)) for key in keys]
    after = [choose("t", left, OutgoingMessage(b"", key=key)) for key in keys]
    back = [choose("t", full, OutgoingMessage(b"", key=key)) for key in keys]
    assert back == before
    for old, new in zip(before, after, strict=True):
        assert new == old or old == gone


def test_the_order_of_partitions_does_not_matter() -> None:
    """A slot belongs to a partition, not to a place in a list."""
    full = parts("0-0", "0-1", "3-0", "12-7")
    turned = full[::-1]
    ours = [full[n] for n in plan_slots(full)]
    assert ours == [turned[n] for n in plan_slots(turned)]


def test_keys_are_spread_evenly() -> None:
    """No partition of ten has less than half or more than twice its share."""
    ten = parts(*(f"{b}-{p}" for b in range(5) for p in range(2)))
    slots = plan_slots(ten)
    shares = [slots.count(n) for n in range(10)]
    assert sum(shares) == KEY_SLOTS
    assert min(shares) > KEY_SLOTS / 20
    assert max(shares) < KEY_SLOTS / 5


def test_where_a_key_lives_never_changes() -> None:
    """Golden: another release, or another process, sends a key to the same place."""
    four = parts("0-0", "0-1", "1-0", "1-1")
    slots = plan_slots(four)
    keys = ["user-1", "user-2", "", "é", b"\xff\x00"]
    assert [slot_of(key) for key in keys] == [1556, 1966, 0, 3390, 3981]
    octets = [key.encode() if isinstance(key, str) else key for key in keys]
    assert slots_of(octets) == [1556, 1966, 0, 3390, 3981]
    assert [str(four[slots[slot_of(key)]]) for key in keys] == [
        "t/1-0",
        "t/0-0",
        "t/0-1",
        "t/1-0",
        "t/1-0",
    ]


def test_the_hash_does_not_depend_on_the_process() -> None:
    """Another interpreter, with another seed of `hash`, agrees."""
    code = (
        "from metaq.client.partitioner import *;"
        "print(sum(plan_slots([parse_partition('t', n) for n in ('0-0','0-1','7-3')])))"
    )
    here = sum(plan_slots(parts("0-0", "0-1", "7-3")))
    there = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True,
        env={"PYTHONHASHSEED": "77"},
    )  # fmt: skip
    assert int(there.stdout) == here


def test_text_keys_count_as_their_bytes() -> None:
    """A key is the same as text and as UTF-8."""
    assert slot_of("é") == slot_of("é".encode())
    assert 0 <= slot_of("\ud800") < KEY_SLOTS


@pytest.mark.parametrize(
    ("selector", "may_move", "sees_absent"),
    [
        (RoundRobin(), True, False),
        (KeyHash(), False, False),
        (KeyHash(wait=True), False, True),
        (Pinned(0), False, True),
    ],
)
def test_selectors_say_what_may_become_of_their_choice(
    selector: object, may_move: bool, sees_absent: bool
) -> None:
    """Only messages without a chosen place go elsewhere."""
    assert getattr(selector, "may_move") is may_move  # noqa: B009  # a Selector has none
    assert getattr(selector, "sees_absent") is sees_absent  # noqa: B009  # likewise


def test_pinned_by_name_takes_a_partition_nobody_has_seen() -> None:
    """It will wait for it."""
    pinned = Pinned("9-4")
    assert pinned("t", parts("0-0"), MESSAGE) == parts("9-4")[0]


def test_pinned_by_number_takes_the_first_broker_that_has_it() -> None:
    """And says so when none has."""
    assert Pinned(1)("t", parts("0-0", "2-1", "3-1"), MESSAGE) == parts("2-1")[0]
    with pytest.raises(NoBrokerError, match="topic t has no partition 7"):
        Pinned(7)("t", parts("0-0"), MESSAGE)


@pytest.mark.parametrize(
    "text",
    [
        *["", "-", "1-", "-1", "a-1", "1-2-3", "1", "٣-1", "1 -2", "1-2\n"],
        *[21 * "1" + "-1", 1, b"0-1"],
    ],
)
def test_what_is_no_partition_is_refused(text: Any) -> None:
    """The error shows what was given, text or not."""
    with pytest.raises(
        (TypeError, ConfigError), match=r"expected .*'<broker>-<partition>'"
    ):
        parse_partition("t", text)


def test_every_partition_that_a_broker_can_register_can_be_named() -> None:
    """Numbers are bounded one by one, as in the names of ZooKeeper's nodes."""
    longest = TopicPartition("t", BrokerId(int(20 * "9")), int(20 * "8"))
    assert parse_partition("t", longest.name) == longest
    assert parse_partition("t", longest) == longest
    with pytest.raises(ConfigError, match="expected one of topic u, got t/9999"):
        parse_partition("u", longest)
