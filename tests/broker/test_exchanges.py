"""Exchanges of a broker: which it serves, and which not."""

import gc
import tracemalloc
from dataclasses import replace

import pytest

from metaq.broker import exchanges
from metaq.errors import ServerError
from metaq.routing.match import (
    RESULTS_REMEMBERED_MAX,
    Binding,
    ExchangeKind,
    remembered,
)
from tests.broker.route_rig import EXCHANGE, TOPICS, RouteRig, exchange_of

ALL = Binding("t0", "#")
BINDINGS = 2000
BINDING_BYTES_MAX = 1400
"""Memory of a binding, in definition and index."""
KEYS_BYTES_MAX = 4 << 20
"""Memory of RESULTS_REMEMBERED_MAX short routing keys with their topics."""


def test_an_exchange_is_no_topic_whatever_pattern_matches_it() -> None:
    """If a topic has its name the topic stays, and health says why."""
    rig = RouteRig(ALL)
    with pytest.raises(ServerError, match="do not accept"):
        rig.context.topics.open_for_put(EXCHANGE, 0)
    served = rig.exchanges
    served.apply({EXCHANGE: exchange_of(ALL)}, {*TOPICS, EXCHANGE})
    assert not rig.context.topics.exchanges
    (problem,) = served.problems
    assert problem == (
        f"exchange '{EXCHANGE}' is not served: a topic has that name; delete one of the"
        " two"
    )
    served.apply({EXCHANGE: exchange_of(ALL)}, TOPICS)
    assert rig.context.topics.exchanges[EXCHANGE].matcher.topics("a") == ("t0",)
    assert not served.problems


def test_names_of_the_broker_are_not_served() -> None:
    """And that is said."""
    rig = RouteRig()
    rig.exchanges.apply({"__x": exchange_of()}, TOPICS)
    assert not rig.context.topics.exchanges
    (problem,) = rig.exchanges.problems
    assert "names that begin with '__'" in problem


def test_changes_are_in_effect_and_the_version_of_the_topics_says_so() -> None:
    """So nothing that was resolved before is used: kinds, bindings, alternates.

    The registration hears of it: it depends on the topics that are bound.
    """
    rig = RouteRig(ALL)
    context = rig.context
    rig.changes.clear()
    version = context.topics.version
    rig.bind(Binding("t1", "a.*"))
    exchange = context.topics.exchanges[EXCHANGE]
    assert exchange.matcher.topics("a.b") == ("t1",)
    rig.bind(Binding("t1", "a.*"), alternate="other")
    assert context.topics.exchanges[EXCHANGE].alternate == "other"
    rig.bind(Binding("t1", "a.*"), kind=ExchangeKind.DIRECT)
    assert context.topics.exchanges[EXCHANGE].matcher.topics("a.b") == ()
    assert len(rig.changes) == 3
    rig.changes.clear()
    rig.exchanges.apply({}, TOPICS)
    assert rig.changes == [None]
    assert context.topics.version > version


@pytest.mark.slow
def test_bindings_that_cannot_be_are_left_out_and_too_many_of_all_refused() -> None:
    """Both are said in a sentence."""
    rig = RouteRig(Binding("t0", "a*"), ALL)
    (problem,) = rig.exchanges.problems
    assert problem.startswith(f"binding 't0 a*' of exchange '{EXCHANGE}' is not in eff")
    many = {
        f"e{k}": exchange_of(*[Binding(f"t{n}", "a") for n in range(10_000)])
        for k in range(exchanges.BINDINGS_ALL_MAX // 10_000 + 1)
    }
    rig.exchanges.apply(many, TOPICS)
    assert len(rig.context.topics.exchanges) == 5
    (problem,) = rig.exchanges.problems
    assert problem == (
        "exchange 'e5' is not served: expected at most 50000 bindings on a broker, got"
        " 60000"
    )


def test_an_exchange_that_is_not_understood_takes_nothing() -> None:
    """With a binding left out a topic would lack messages, and no sender hear of it."""
    rig = RouteRig(ALL)
    topics, odd = rig.context.topics, replace(exchange_of(ALL), unread={"b1": "new"})
    for defined, unread in (
        ({EXCHANGE: odd}, {}),
        ({}, {EXCHANGE: "new"}),
    ):
        rig.exchanges.apply({EXCHANGE: exchange_of(ALL)}, TOPICS)
        assert topics.exchanges
        rig.exchanges.apply(defined, TOPICS, unread)
        assert not topics.exchanges
        with pytest.raises(ServerError, match=r"'events' is not served by .*new"):
            topics.open_for_put(EXCHANGE, 0)
    rig.exchanges.apply({EXCHANGE: odd}, TOPICS)
    (problem,) = rig.exchanges.problems
    assert problem == (
        f"exchange '{EXCHANGE}' is not served: binding b1 cannot be read: new"
    )


def test_what_is_sent_to_a_deleted_exchange_is_refused_as_that() -> None:
    """Also by a broker that began after it was deleted."""
    rig = RouteRig()
    over = replace(exchange_of(), is_deleted=True)
    rig.exchanges.apply({"over": over}, TOPICS)
    with pytest.raises(ServerError, match="'over' is no exchange"):
        rig.context.topics.open_for_put("over", 0)


def many_bindings(kind: ExchangeKind, turn: int) -> list[Binding]:
    """Return bindings that no other turn has."""
    numbers = range(turn * BINDINGS, (turn + 1) * BINDINGS)
    if kind is ExchangeKind.HEADERS:
        return [Binding("t0", headers=(("id", str(n)), ("kind", "a"))) for n in numbers]
    return [Binding("t0", f"order.{n}") for n in numbers]


@pytest.mark.slow
def test_memory_is_that_of_the_bindings_and_of_so_many_keys() -> None:
    """Bindings that go leave nothing, and neither do exchanges, nor keys asked for."""
    rig, kinds = RouteRig(), (*ExchangeKind,)
    kept = [kind for kind in kinds if kind is not ExchangeKind.FANOUT]
    held = list[int]()
    tracemalloc.start()
    try:
        for turn in range(4):
            defined = {
                f"{kind.value}-{turn % 2}": exchange_of(
                    *many_bindings(kind, turn), kind=kind
                )
                for kind in kept
            }
            rig.exchanges.apply(defined, TOPICS)
            for each in rig.context.topics.exchanges.values():
                for number in range(RESULTS_REMEMBERED_MAX):
                    each.matcher.topics(f"order.{number}.{turn}")
            del defined
            gc.collect()
            held.append(tracemalloc.get_traced_memory()[0])
    finally:
        tracemalloc.stop()
    assert remembered.cache_info().currsize == RESULTS_REMEMBERED_MAX
    assert max(held) <= BINDING_BYTES_MAX * len(kept) * BINDINGS + KEYS_BYTES_MAX
    assert max(held[1:]) <= 1.05 * held[0]
    rig.exchanges.apply({}, TOPICS)
    assert not remembered.cache_info().currsize
