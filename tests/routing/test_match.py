"""Matching against a reader of patterns that tries everything."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from metaq.errors import ConfigError
from metaq.model import HeaderPairs
from metaq.routing.match import (
    KEY_BYTES_MAX,
    NODES_VISITED_MAX,
    Binding,
    ExchangeKind,
    Matcher,
    check_binding,
    words_of,
)
from tests.cases import for_each

WORDS = ("a", "b", "", "*", "#")
KEYS = st.lists(st.sampled_from(("a", "b", "")), max_size=6).map(".".join)
PATTERNS = st.lists(st.sampled_from(WORDS), max_size=6).map(".".join)
PAIRS = st.tuples(st.sampled_from("xyz"), st.sampled_from((b"1", b"2")))
WANTED = st.dictionaries(
    st.sampled_from("xyz"), st.sampled_from(("1", "2", None)), min_size=1
)
TOPICS = st.sampled_from(("t0", "t1", "t2"))


def named(bindings: Sequence[Binding]) -> dict[str, Binding]:
    return {repr(each): each for each in bindings}


def fits(pattern: Sequence[str], words: Sequence[str]) -> bool:
    """Return whether a pattern matches, by trying each number of words for a `#`."""
    if not pattern:
        return not words
    first, rest = pattern[0], pattern[1:]
    if first == "#":
        return any(fits(rest, words[k:]) for k in range(len(words) + 1))
    return bool(words) and first in {"*", words[0]} and fits(rest, words[1:])


def is_match(
    kind: ExchangeKind, binding: Binding, key: str, headers: HeaderPairs
) -> bool:
    if kind is ExchangeKind.HEADERS:
        found = [
            any(
                name == each and value in {None, text.decode()}
                for each, text in headers
            )
            for name, value in binding.headers
        ]
        return any(found) if binding.matches_any else all(found)
    if kind is ExchangeKind.TOPIC:
        return fits(words_of(binding.key), words_of(key))
    return kind is ExchangeKind.FANOUT or binding.key == key


def bindings_of(kind: ExchangeKind) -> st.SearchStrategy[Binding]:
    if kind is ExchangeKind.HEADERS:
        pairs = WANTED.map(lambda wanted: tuple(sorted(wanted.items())))
        return st.builds(Binding, TOPICS, st.just(""), pairs, st.booleans())
    keys = {ExchangeKind.TOPIC: PATTERNS, ExchangeKind.DIRECT: KEYS}
    return st.builds(Binding, TOPICS, keys.get(kind, st.just("")))


@pytest.mark.slow
@given(st.data())
def test_every_kind_finds_what_a_reader_finds_that_tries_everything(
    data: st.DataObject,
) -> None:
    """Also after changes: what was remembered or left over matches nothing any more."""
    kind = data.draw(st.sampled_from(ExchangeKind))
    matcher = Matcher(kind)
    for _ in range(3):
        bindings = data.draw(st.lists(bindings_of(kind), max_size=8))
        matcher.replace(named(bindings))
        for _ in range(4):
            key, headers = data.draw(KEYS), tuple(data.draw(st.lists(PAIRS)))
            expected = {each for each in bindings if is_match(kind, each, key, headers)}
            assert set(matcher.find(key, headers)) == expected
            topics = tuple(sorted({each.topic for each in expected}))
            assert matcher.topics(key, headers) == topics


@pytest.mark.slow
def test_ten_thousand_patterns_are_told_apart() -> None:
    """Each key finds its own binding, and those for all keys."""
    matcher = Matcher(ExchangeKind.TOPIC)
    own = [Binding(f"t{k}", f"order.{k}.*") for k in range(9_998)]
    both = [Binding("all", "#"), Binding("paid", "#.paid")]
    matcher.replace(named(own + both))
    for k in (0, 4_000, 9_997):
        assert matcher.topics(f"order.{k}.paid") == ("all", "paid", f"t{k}")
    assert matcher.topics("order.1") == ("all",)
    matcher.replace(named(own))
    assert matcher.topics("order.1") == ()


def test_many_hashes_in_one_pattern_are_walked_in_one_pass() -> None:
    """A reader that tries each number of words would not end."""
    matcher = Matcher(ExchangeKind.TOPIC)
    matcher.replace(named([Binding("t", ".".join(["#", "a"] * 16))]))
    assert matcher.topics(".".join(["a"] * 128)) == ("t",)
    assert matcher.topics(".".join(["a"] * 127 + ["b"])) == ()


def test_patterns_that_all_may_match_are_not_all_looked_at() -> None:
    """A broker would look at millions of places for one message, for minutes."""
    matcher, words = Matcher(ExchangeKind.TOPIC), [format(k, "09b") for k in range(500)]
    patterns = [
        ".#.".join(["#", *each]).translate({48: "a", 49: "b"}) for each in words
    ]
    matcher.replace(named([Binding("t", each) for each in patterns]))
    assert matcher.topics(".".join("abababaab")) == ("t",)
    with pytest.raises(ConfigError, match=f"at most {NODES_VISITED_MAX} places .* got"):
        matcher.topics(".".join("ab" * 60))


@for_each(
    "kind, binding, words",
    [
        (ExchangeKind.TOPIC, Binding("t", "a*"), "got 'a"),
        (ExchangeKind.FANOUT, Binding("t", "a"), "compares no key"),
        (ExchangeKind.HEADERS, Binding("t"), "1 header or more"),
        (ExchangeKind.DIRECT, Binding("t", "", (("x", "1"),)), "no headers"),
        (ExchangeKind.HEADERS, Binding("t", "", (("", "1"),)), "a name of its own"),
        (ExchangeKind.DIRECT, Binding("t", "k" * 256), f"{KEY_BYTES_MAX}"),
        (ExchangeKind.TOPIC, Binding("t", "a." * 32 + "a"), "at most 32 words, got 33"),
    ],
)
def test_a_binding_that_cannot_be_is_refused(
    kind: ExchangeKind, binding: Binding, words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        check_binding(kind, binding)


def test_the_longest_text_of_a_binding() -> None:
    """255 bytes."""
    check_binding(ExchangeKind.DIRECT, Binding("t", "k" * 255))


def test_bindings_that_cannot_be_used_are_named_and_left_out() -> None:
    """Until they are gone."""
    matcher = Matcher(ExchangeKind.DIRECT)
    some = {"a": Binding("t1", "k"), "b": Binding("t2", "k")}
    matcher.replace(some | {"c": Binding("t", "", (("x", "1"),))})
    assert matcher.topics("k") == ("t1", "t2")
    assert matcher.problems == {"c": "binding: a direct exchange takes no headers"}
    matcher.replace({"a": some["a"]})
    assert not matcher.problems
    assert matcher.topics("k") == ("t1",)


def test_a_binding_says_what_it_takes() -> None:
    """So commands print it."""
    pairs = (("region", "eu"), ("vip", None))
    assert str(Binding("orders", "a.#")) == "orders a.#"
    assert str(Binding("orders", "", pairs)) == "orders region=eu and vip"
    assert str(Binding("orders", "", pairs, matches_any=True)).endswith("eu or vip")
