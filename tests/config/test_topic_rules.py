"""Which topic names are taken."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from metaq.config.topic_rules import (
    TOPIC_BYTES_MAX,
    TopicRules,
    compile_topic_pattern,
    is_safe_topic,
)
from metaq.errors import ConfigError


@pytest.mark.parametrize(
    ("configured", "topic", "is_accepted"),
    [
        ("test", "test", True),
        ("test", "test1", False),
        ("test", "atest", False),
        ("wild-*", "wild-", True),
        ("wild-*", "wild-x-1", True),
        ("wild-*", "wild", False),
        ("wild-*", "wild-*", True),
        ("*", "anything", True),
        ("a*b*c", "axxbyyc", True),
        ("a*b*c", "abc", True),
        ("a*b*c", "acb", False),
        ("*aab", "aaab", True),
        ("*ab*ab", "ab", False),
        ("a.b", "axb", True),
        ("a.*b", "ab", False),
        ("!@#$%", "!@#$%", False),
        ("(a|b)-*", "b-1", True),
        ("主题*", "主题一", True),
    ],
)
def test_a_name_is_a_pattern_for_the_whole_topic(
    configured: str, topic: str, is_accepted: bool
) -> None:
    """A star stands for anything; the other marks of expressions stay active."""
    assert TopicRules().extended([configured]).accepts(topic) is is_accepted


@given(
    st.text("ab*.", max_size=8),
    st.text("abc", min_size=1, max_size=10),
)
def test_fast_matching_is_the_plain_expression(configured: str, topic: str) -> None:
    """The linear form accepts exactly what MetaQ's expression accepts."""
    plain = re.fullmatch(configured.replace("*", ".*"), topic) is not None
    matched = compile_topic_pattern(configured).fullmatch(topic) is not None
    assert matched == plain


def test_many_stars_cost_little() -> None:
    """A stranger's topic cannot make a pattern run for ever."""
    rules = TopicRules().extended(["*a" * 20 + "b"])
    assert not rules.accepts("a" * TOPIC_BYTES_MAX)


def test_patterns_only_grow() -> None:
    """A name accepted once stays accepted until restart."""
    first = TopicRules().extended(["a", "b*"])
    second = first.extended(["b*", "c", "c"])
    assert second.names == ("a", "b*", "c")
    assert all(second.accepts(topic) for topic in ("a", "b1", "c"))
    assert not first.accepts("c")


@pytest.mark.parametrize(
    "topic",
    ["", ".", "..", "a/b", "../a", "a\0b", "a b", "a\tb", "a\r", "a\u2028b", "\u202ea",
     "a\ud800", "\ue000", "\uffff", "x" * (TOPIC_BYTES_MAX + 1),
     "主" * (TOPIC_BYTES_MAX // 3 + 1)],
)  # fmt: skip
def test_an_unsafe_name_is_refused_whatever_the_patterns_say(topic: str) -> None:
    """A topic becomes a directory name, a znode and a token of a line."""
    assert not is_safe_topic(topic)
    assert not TopicRules().extended(["*", ".*", "[^a]*"]).accepts(topic)


@pytest.mark.parametrize("topic", ["a", "a-b", "..a", "!@#$%", "主题", "x" * 244])
def test_other_names_are_safe(topic: str) -> None:
    """Any visible characters will do, up to what a directory name holds."""
    assert is_safe_topic(topic)


@pytest.mark.parametrize("name", ["a(", "[", "a{99999999999}", "+", "\\"])
def test_a_broken_pattern_is_an_error(name: str) -> None:
    """It is found when the file is read, not when a message arrives."""
    with pytest.raises(ConfigError, match="is no topic pattern"):
        TopicRules().extended([name])
