"""Puts to an exchange: each target once, all of them or none, answered once."""

import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from metaq.broker.acks import PUT_OVERHEAD_BYTES
from metaq.broker.handlers.route import TARGETS_MAX, read_address
from metaq.protocol.commands import NO_CHECKSUM, Put
from metaq.protocol.transaction_ids import parse_key
from metaq.record.flags import encode_payload
from metaq.record.layout import encode_record
from metaq.routing.match import Binding, ExchangeKind
from metaq.txn.figures import TransactionLimits
from tests.broker.delay_rig import FakeSession, result_of
from tests.broker.route_rig import EXCHANGE, TOPICS, RouteRig, batch_of
from tests.broker.stepped import cut_at_sync
from tests.cases import for_each
from tests.rigs.fs import keep_all, keep_none

ORDERS, PAID = Binding("t0", "order.#"), Binding("t1", "*.paid")


def test_a_batch_goes_to_each_bound_topic_once_with_one_id_per_message() -> None:
    """In its order, and the reply counts the copies."""
    rig = RouteRig(ORDERS, PAID)
    reply = rig.send(
        batch_of(("order.paid", b"|a"), ("order.new", b"|b"), ("x.paid", b"|c"))
    )
    assert reply.status == 200
    assert reply.text.split()[1:] == ["0", "-1", "routed=4"]
    first_id = int(reply.text.split()[0])
    assert rig.payloads("t0") == [b"|a", b"|b"]
    assert rig.payloads("t1") + rig.payloads("t1", 1) == [b"|a", b"|c"]
    assert rig.ids("t0") == [first_id, first_id + 1]
    assert rig.ids("t1") + rig.ids("t1", 1) == [first_id, first_id + 2]
    assert rig.context.counters.routed == {"routed": 3}


def test_a_key_has_one_partition_of_each_topic() -> None:
    """Messages without one go where their batch goes."""
    rig = RouteRig(Binding("t2", "#"))
    for each in range(8):
        key = f"k{each % 3}"
        assert rig.send(batch_of(("a", b"|%d" % each, key))).status == 200
    for each in range(3):
        places = [p for p in range(3) if b"|%d" % each in rig.payloads("t2", p)]
        assert len(places) == 1
        own = rig.payloads("t2", places[0])
        expected = [b"|%d" % n for n in range(each, 8, 3)]
        assert [one for one in own if one in expected] == expected


@for_each(
    "attribute, headers, routing_key",
    [
        (None, (), ""),
        ("order.paid", (), "order.paid"),
        ("attribute", (("routing-key", b"a.b"),), "a.b"),
        ("attribute", (("x", b"1"),), "attribute"),
        (None, (("routing-key", b"a"), ("routing-key", b"b")), "a"),
    ],
)
def test_the_header_is_the_routing_key_and_without_it_the_attribute(
    attribute: str | None, headers: tuple[tuple[str, bytes], ...], routing_key: str
) -> None:
    """Java producers have attributes alone."""
    payload, flag = encode_payload(b"data", attribute, None, headers)
    record = bytearray(b"before" + encode_record(payload, id=0, flag=flag))
    assert read_address(record, 6)[0] == routing_key


@for_each("payload", [b"", b"\0\0\0\x09abc", b"\xff\xff\xff\xffabc", b"\0\0"])
def test_an_attribute_that_is_cut_short_is_no_routing_key(payload: bytes) -> None:
    """And no error: a put to a topic stores it, too."""
    record = bytearray(encode_record(payload, id=0, flag=3))
    assert read_address(record, 0) == ("", None, ())


def test_a_single_put_is_routed_by_its_attribute() -> None:
    """To any partition, as clients without ZooKeeper send it, as well."""
    rig = RouteRig(ORDERS, PAID)
    payload, flag = encode_payload(b"|a", "order.paid")
    for partition in (0, -1):
        put = Put(EXCHANGE, partition, payload, flag, NO_CHECKSUM, 1, None)
        reply = rig.put(put)
        assert reply.status == 200, reply
        assert reply.text.split()[1:] == ["0", "-1", "routed=2"]
    assert rig.payloads("t0") == [b"|a", b"|a"]
    wrong = rig.put(replace(put, checksum=5))
    assert "hecksum" in wrong.text


def test_what_matches_nothing_is_unroutable_or_goes_to_the_alternate_or_nowhere() -> (
    None
):
    """A batch with one such message is stored as a whole or not at all."""
    rig = RouteRig(ORDERS)
    mixed = batch_of(("order.a", b"|a"), ("x", b"|b"), is_mandatory=True)
    reply = rig.send(mixed)
    assert reply.status == 500
    assert reply.text.endswith(
        f"no binding of exchange '{EXCHANGE}' matches routing key 'x'"
        " [unroutable messages=1]"
    )
    many = batch_of(("x", b"|a"), ("order.a", b"|b"), ("y", b"|c"), is_mandatory=True)
    assert rig.send(many).text.endswith(
        "matches routing key 'x' (and 1 more) [unroutable messages=0,2]"
    )
    alone = batch_of(("x", b"|b"), is_mandatory=True)
    assert rig.send(alone).text.endswith("matches routing key 'x' [unroutable]")
    assert rig.payloads("t0") == []
    optional, plain = (replace(mixed, is_mandatory=each) for each in (False, None))
    assert rig.send(optional).text.endswith(" routed=1")
    assert rig.send(plain).text.endswith("[unroutable messages=1]")
    assert rig.payloads("t0") == [b"|a"]
    rig.bind(ORDERS, alternate="other")
    assert rig.send(optional).text.endswith(" routed=2")
    assert rig.send(plain).text.endswith(" routed=2")
    assert rig.payloads("other") == [b"|b"] * 2
    assert rig.send(mixed).status == 500
    assert rig.context.counters.routed == {
        "routed": 7, "unroutable": 6, "dropped": 1, "alternate": 2
    }  # fmt: skip


def test_a_refusal_does_not_repeat_a_long_attribute() -> None:
    """That of a message for an exchange that compares no keys may have megabytes."""
    rig = RouteRig(Binding("t0", "", (("a", "b"),)), kind=ExchangeKind.HEADERS)
    reply = rig.send(batch_of(("x" * 100_000, b"|a")))
    assert f"routing key '{'x' * 255}...' [unroutable]" in reply.text


def test_a_single_put_that_matches_nothing_is_dropped_and_its_receipt_says_so() -> None:
    """It may be of a Java client, which sends it again for ever."""
    rig = RouteRig(ORDERS)
    reply = rig.put(Put(EXCHANGE, 0, b"|a", 0, NO_CHECKSUM, 1, None))
    assert reply.status == 200
    assert reply.text.endswith(" routed=0")


def close_partition(rig: RouteRig) -> None:
    for topic, partition in (("t0", 0), ("t1", 0), ("t1", 1)):
        rig.context.topics.close_partitions(topic, start=partition, end=partition)


def withdraw(rig: RouteRig) -> None:
    rig.context.topics.withdraw(frozenset({"t1"}))


def bind_many(rig: RouteRig) -> None:
    rig.bind(*[Binding(f"t{k}", "order.paid") for k in range(TARGETS_MAX + 1)])


@for_each(
    "prepare, words",
    [
        (close_partition, "has been closed"),
        (withdraw, "do not accept topic t1"),
        (bind_many, f"expected at most {TARGETS_MAX} topics for a message, got 65"),
    ],
)
def test_what_one_target_refuses_is_nowhere(
    prepare: Callable[[RouteRig], None], words: str
) -> None:
    """All are looked at before anything is appended."""
    rig = RouteRig(ORDERS, PAID)
    prepare(rig)
    reply = rig.send(batch_of(("order.paid", b"|a")))
    assert words in reply.text, reply
    assert rig.payloads("t0") == []


@for_each(
    "changes, words",
    [
        ({"partition": 1}, "wrong partition 1"),
        ({"topic": "t0", "is_mandatory": False}, "this broker [no-exchange]"),
        ({"count": 2}, "expected 2 records"),
    ],
)
def test_what_no_exchange_takes_is_refused(changes: dict[str, int], words: str) -> None:
    rig = RouteRig(ORDERS)
    reply = rig.send(replace(batch_of(("order.a", b"|a")), **changes))
    assert reply.status == 500
    assert words in reply.text


def test_a_routing_key_has_a_bound() -> None:
    """It is compared word by word."""
    rig = RouteRig(ORDERS)
    assert rig.send(batch_of(("order." + "a" * 249, b"|a"))).status == 200
    reply = rig.send(batch_of(("order." + "a" * 250, b"|a")))
    assert "expected at most 255 characters, got 256" in reply.text


def test_a_key_that_too_many_patterns_may_match_is_refused() -> None:
    """In a sentence; other keys go on."""
    begins = itertools.product("ab", repeat=5)
    patterns = [".#.".join(["#", *begin, *["a"] * 10]) for begin in begins]
    rig = RouteRig(*(Binding("t0", each) for each in patterns))
    assert rig.send(batch_of((".".join("a" * 60), b"|a"))).status == 200
    reply = rig.send(batch_of((".".join("ab" * 60), b"|a")))
    assert f"exchange '{EXCHANGE}': routing key 'a.b.a" in reply.text
    assert "expected at most 50000 places" in reply.text


class HoldingSession(FakeSession):
    """A session that counts what is in flight."""

    held = 0

    def hold(self, *, count: int, size_bytes: int) -> None:
        self.held += size_bytes

    def answer(self, replies: bytes, *, size_bytes: int = 0, **more: Any) -> None:
        self.held -= size_bytes
        super().answer(replies, **more)


def test_bytes_are_in_flight_once_for_each_target_until_the_answer() -> None:
    """So the bound of a connection holds for what it makes of its puts."""
    rig = RouteRig(ORDERS, PAID, Binding("t2", "#"))
    batch = batch_of(("order.paid", b"|" + bytes(1000)))
    session = HoldingSession(rig.context)
    rig.begin(batch, session)
    assert session.held == 3 * len(batch.payload) + PUT_OVERHEAD_BYTES
    rig.bench.run()
    assert session.replies
    assert session.held == 0


def test_a_repeated_batch_is_stored_once_in_each_target() -> None:
    """In flight, stored, and after a power cut of a disk that has the notes."""
    rig = RouteRig(ORDERS, PAID)
    batch = batch_of(
        ("order.paid", b"|a"), ("order.b", b"|b"), producer="p", sequence=7
    )
    first, second = rig.begin(batch), rig.begin(batch)
    rig.bench.run()
    assert first.replies == second.replies
    third = rig.send(batch)
    assert third == result_of(first.replies[0])
    assert rig.context.counters.batch_repeated == 2
    rig = rig.again(keep_all)
    rig.bind(ORDERS, PAID)
    assert rig.send(batch) == third
    assert rig.payloads("t0") == [b"|a", b"|b"]
    assert rig.payloads("t1") + rig.payloads("t1", 1) == [b"|a"]


def test_a_repeated_batch_is_stored_where_it_is_missing() -> None:
    """A topic that was bound meanwhile gets it, the others have it."""
    rig = RouteRig(ORDERS)
    batch = batch_of(("order.paid", b"|a"), producer="p", sequence=0)
    reply = rig.send(batch)
    rig.bind(ORDERS, PAID)
    again = rig.send(batch)
    assert again.text.split()[0] == reply.text.split()[0]
    assert rig.payloads("t0") == [b"|a"]
    assert rig.payloads("t1") + rig.payloads("t1", 1) == [b"|a"]


def test_numbers_that_were_used_for_other_messages_are_refused_everywhere() -> None:
    """Also where another target would take them."""
    rig = RouteRig(ORDERS)
    rig.send(batch_of(("order.a", b"|a"), producer="p", sequence=5))
    rig.bind(ORDERS, Binding("other", "order.#"))
    reply = rig.send(batch_of(("order.a", b"|b"), producer="p", sequence=0))
    assert reply.text.endswith("[sequence-used]")
    assert rig.payloads("other") == []


def test_a_disk_that_fails_at_one_target_leaves_it_in_doubt() -> None:
    """The others keep their messages; it is no refusal."""
    rig = RouteRig(ORDERS, PAID)
    rig.send(batch_of(("order.paid", b"|a")))
    session = rig.begin(batch_of(("order.paid", b"|b"), producer="p", sequence=0))
    log = rig.bench.logs.manager.logs()[rig.place_of(b"|a", "t1")]
    log.end_in_doubt("test", until=log.next_offset)
    rig.bench.run()
    reply = result_of(session.replies[0])
    assert reply.status == 500
    assert reply.text.endswith("[in-doubt]")
    assert rig.payloads("t0")[-1] == b"|b"


def test_in_a_transaction_all_targets_have_it_with_the_commit() -> None:
    """Before that none has; without a target there is nothing to commit."""
    rig = RouteRig(ORDERS, PAID)
    assert rig.commit(batch_of(("order.paid", b"|a")), batch_of(("order.b", b"|b")))
    assert rig.payloads("t0") == [b"|a", b"|b"]
    assert rig.payloads("t1") + rig.payloads("t1", 1) == [b"|a"]
    assert rig.commit(batch_of(("nothing", b"|c"), is_mandatory=False))
    assert not rig.commit(batch_of(("nothing", b"|c")))
    assert rig.payloads("t0") == [b"|a", b"|b"]


@pytest.mark.slow
def test_a_commit_that_is_cut_is_in_all_targets_or_in_none() -> None:
    """Whatever of it is on the disk; a message has one id in all of them.

    A start took the second copy for a repetition: it was in the first topic alone.
    """
    seen = list[bool]()
    for number, keep in itertools.product(range(8), (keep_all, keep_none)):
        rig = RouteRig(ORDERS, PAID)
        batch = batch_of(("order.paid", b"|a"), ("order.paid", b"|b"))
        with cut_at_sync(rig.fs, number, lambda: None) as found:
            assert rig.commit(batch)
        again = RouteRig(fs=found[0][0].crash(keep))
        again.bench.run()
        first, *others = [
            sorted(
                each for p in range(TOPICS[name]) for each in again.payloads(name, p)
            )
            for name in ("t0", "t1")
        ]
        assert [first] == others
        seen.append(bool(first))
    assert {*seen} == {False, True}


def test_a_transaction_has_room_for_the_copies_of_all_targets_or_for_none() -> None:
    """A message is journalled once for each topic."""
    batch = batch_of(("order.paid", b"|" + b"a" * 1000))
    limits = TransactionLimits(
        open_count_max=10,
        held_bytes_max=2000,
        timed_count_max=10,
        timeout_s_max=60,
        journal_bytes_max=1 << 30,
    )
    assert RouteRig(ORDERS, limits=limits).commit(batch)
    rig, key = RouteRig(ORDERS, PAID, limits=limits), "TX:s:1"
    session = FakeSession(rig.context)
    rig.bench.coordinator.begin(key, session, 0)
    rig.begin(replace(batch, transaction=parse_key(key)), session)
    assert "hold too much" in result_of(session.replies[0]).text


def test_a_transaction_that_is_rolled_back_leaves_nothing() -> None:
    """Nor does one that a crash ends before its commit."""
    rig = RouteRig(ORDERS, PAID)
    assert not rig.commit(batch_of(("order.paid", b"|a")), is_committed=False)
    rig = rig.again(keep_all)
    assert rig.payloads("t0") == []
    assert rig.payloads("t1") == []


@pytest.mark.parametrize("kind", [ExchangeKind.FANOUT, ExchangeKind.HEADERS])
def test_other_kinds_route_by_their_rules(kind: ExchangeKind) -> None:
    """Headers are those of the message, the routing key is not asked."""
    pairs = (("region", "eu"),) if kind is ExchangeKind.HEADERS else ()
    rig = RouteRig(Binding("t0", "", pairs), kind=kind)
    assert rig.send(batch_of(("", b"|a"), headers=(("region", b"eu"),))).text.endswith(
        "routed=1"
    )
    missed = rig.send(
        batch_of(("", b"|b"), headers=(("region", b"us"),), is_mandatory=False)
    )
    assert missed.text.endswith(f"routed={kind is ExchangeKind.FANOUT:d}")
