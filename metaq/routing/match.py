"""The bindings of an exchange, and which of them a message matches. Pure.

| kind | a binding matches |
|---|---|
| `direct` | its key is the routing key |
| `fanout` | always |
| `topic` | its pattern does: words by dots, `*` is one word, `#` any number of them |
| `headers` | all its headers are there, or any of them: with that value, or at all |

An empty routing key has no words. Topic patterns are a trie, which is walked once for a
key, with all places that it may be at; the others are found by their terms, a key or a
header each. What was found is remembered by key, as long as no binding changes.
"""

import enum
import zlib
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Final

from metaq.errors import ConfigError
from metaq.model import HeaderPairs

ROUTING_KEY: Final = "routing-key"
"""Header with the routing key of a message; without it the attribute is."""
BINDINGS_MAX: Final = 10_000
"""Bindings of an exchange."""
KEY_BYTES_MAX: Final = 255
"""Bytes of a routing key, of a pattern, and of the name or value of a header."""
WORDS_MAX: Final = 32
"""Words of a pattern: a broker indexes all of an exchange in one turn of its loop, and
keeps each word that is not the beginning of another pattern."""
HEADERS_MAX: Final = 16
"""Headers of a binding."""
PLACES_MAX: Final = 50_000
"""Places in all patterns that are looked at for one routing key: a twentieth of a
second. Few patterns with many `#` have more, and thousands with a few."""
RESULTS_REMEMBERED_MAX: Final = 10_000
"""Routing keys, last asked for, for which the topics are remembered: of all exchanges
together, so that no number of them takes more."""
ONE: Final = "*"
ANY: Final = "#"


class ExchangeKind(enum.Enum):
    """Rule by which an exchange compares messages with its bindings."""

    DIRECT = "direct"
    FANOUT = "fanout"
    TOPIC = "topic"
    HEADERS = "headers"


@dataclass(frozen=True, slots=True)
class Binding:
    """A topic that is bound to an exchange, and which messages it gets."""

    topic: str
    key: str = ""
    """Routing key (`direct`) or pattern (`topic`); "" for the other kinds."""
    headers: tuple[tuple[str, str | None], ...] = ()
    """Names ascending, with the value or None for any (`headers`); () otherwise."""
    matches_any: bool = False
    """Whether one of the headers is enough."""

    def __str__(self) -> str:
        pairs = [
            name if value is None else f"{name}={value}" for name, value in self.headers
        ]
        joined = (" or " if self.matches_any else " and ").join(pairs)
        return " ".join(filter(None, (self.topic, self.key, joined)))


def check_binding(kind: ExchangeKind, binding: Binding) -> None:
    """Refuse a binding that an exchange of this kind cannot have.

    Raises:
        ConfigError: the text says what is wrong.
    """
    has_key = kind in {ExchangeKind.DIRECT, ExchangeKind.TOPIC}
    if binding.key and not has_key:
        raise ConfigError(
            f"binding: a {kind.value} exchange compares no key, got '{binding.key}'"
        )
    if (kind is ExchangeKind.HEADERS) != bool(binding.headers):
        wanted = "1 header or more" if kind is ExchangeKind.HEADERS else "no headers"
        raise ConfigError(f"binding: a {kind.value} exchange takes {wanted}")
    texts = [binding.key, *(text or "" for pair in binding.headers for text in pair)]
    if any(len(text.encode()) > KEY_BYTES_MAX for text in texts):
        raise ConfigError(f"binding: expected at most {KEY_BYTES_MAX} bytes in a text")
    names = [name for name, _ in binding.headers]
    if "" in names or len(set(names)) < len(names) or len(names) > HEADERS_MAX:
        raise ConfigError(
            f"binding: expected at most {HEADERS_MAX} headers, each with a name of its"
            " own"
        )
    if kind is ExchangeKind.TOPIC:
        words = words_of(binding.key)
        if len(words) > WORDS_MAX:
            raise ConfigError(
                f"pattern '{binding.key}': expected at most {WORDS_MAX} words, got"
                f" {len(words)}"
            )
        for word in words:
            if word not in {ONE, ANY} and (ONE in word or ANY in word):
                raise ConfigError(
                    f"pattern '{binding.key}': '*' and '#' are words of their own, got"
                    f" '{word}'"
                )


def names_checksum(names: Iterable[str]) -> int:
    """Return the CRC-32 of names of bindings, in any order."""
    return zlib.crc32(" ".join(sorted(names)).encode())


def words_of(key: str) -> list[str]:
    """Return the words of a routing key or pattern; an empty one has none."""
    return key.split(".") if key else []


@dataclass(slots=True, eq=False)
class _Node:
    """The patterns that begin alike."""

    next: "dict[str, _Node]" = field(default_factory=dict)
    bindings: dict[Binding, None] = field(default_factory=dict)
    stays: bool = False
    """Whether its last word is `#`, which further words belong to."""


class _Patterns:
    """Bindings with patterns."""

    def __init__(self) -> None:
        self._root = _Node()

    def add(self, binding: Binding) -> None:
        node = self._root
        for word in words_of(binding.key):
            if word not in node.next:
                node.next[word] = _Node(stays=word == ANY)
            node = node.next[word]
        node.bindings[binding] = None

    def remove(self, binding: Binding) -> None:
        path, words = [self._root], words_of(binding.key)
        for word in words:
            path.append(path[-1].next[word])
        del path[-1].bindings[binding]
        for node, word in zip(reversed(path[:-1]), reversed(words), strict=True):
            if node.next[word].next or node.next[word].bindings:
                break
            del node.next[word]

    def find(self, key: str, _headers: HeaderPairs) -> Iterable[Binding]:
        places, count = _with_rests([self._root]), 0
        for word in words_of(key):
            count += len(places)
            if count > PLACES_MAX:
                raise ConfigError(
                    f"routing key '{key[:80]}': expected at most {PLACES_MAX} places in"
                    f" the patterns of its exchange that may match, got {count}"
                )
            after = [node for node in places if node.stays]
            after += [node.next[word] for node in places if word in node.next]
            after += [node.next[ONE] for node in places if ONE in node.next]
            places = _with_rests(after)
        return [binding for node in places for binding in node.bindings]


def _with_rests(nodes: Iterable[_Node]) -> dict[_Node, None]:
    """Return nodes with what follows when a `#` matches no word."""
    found: dict[_Node, None] = {}
    for each in nodes:
        node: _Node | None = each
        while node is not None and node not in found:
            found[node] = None
            node = node.next.get(ANY)
    return found


class _Terms:
    """Bindings with terms: a key, or headers, of which one or all have to be there."""

    def __init__(self, kind: ExchangeKind) -> None:
        self._kind = kind
        self._by_term: dict[Hashable, dict[Binding, None]] = {}

    def add(self, binding: Binding) -> None:
        for term in self._terms_of(binding):
            self._by_term.setdefault(term, {})[binding] = None

    def remove(self, binding: Binding) -> None:
        for term in self._terms_of(binding):
            found = self._by_term[term]
            del found[binding]
            if not found:
                del self._by_term[term]

    def find(self, key: str, headers: HeaderPairs) -> Iterable[Binding]:
        terms: set[Hashable] = {key if self._kind is ExchangeKind.DIRECT else ""}
        if self._kind is ExchangeKind.HEADERS:
            terms = {*headers, *((name, None) for name, _ in headers)}
        counts = Counter[Binding]()
        for term in terms:
            counts.update(self._by_term.get(term, {}).keys())
        return [each for each, count in counts.items() if count >= _needed(each)]

    @staticmethod
    def _terms_of(binding: Binding) -> list[Hashable]:
        if not binding.headers:
            return [binding.key]
        return [
            (name, None if value is None else value.encode())
            for name, value in binding.headers
        ]


def _needed(binding: Binding) -> int:
    return 1 if binding.matches_any else max(1, len(binding.headers))


class Matcher:
    """The bindings of one exchange. Not for several threads."""

    def __init__(self, kind: ExchangeKind) -> None:
        """Begin with no bindings."""
        self.kind: Final = kind
        self.has_keys: Final = kind in {ExchangeKind.DIRECT, ExchangeKind.TOPIC}
        """Whether routing keys are compared."""
        self.problems: dict[str, str] = {}
        """Why a binding cannot be used, by its name."""
        self.checksum = names_checksum(())
        """Of the names of its bindings: others have another one."""
        self._index = _Patterns() if kind is ExchangeKind.TOPIC else _Terms(kind)
        self._bindings: dict[str, Binding] = {}
        self._remember()

    def replace(self, bindings: Mapping[str, Binding]) -> None:
        """Have these bindings and no others.

        Args:
            bindings: by name; the same name is the same binding. Those that an exchange
                of this kind cannot have are problems.
        """
        for name in self._bindings.keys() - bindings.keys():
            self._index.remove(self._bindings.pop(name))
        self.problems = {}
        for name in bindings.keys() - self._bindings.keys():
            try:
                check_binding(self.kind, bindings[name])
            except ConfigError as error:
                self.problems[name] = str(error)
            else:
                self._index.add(bindings[name])
                self._bindings[name] = bindings[name]
        self.checksum = names_checksum(bindings)
        self._remember()

    def bound_topics(self) -> set[str]:
        """Return the topics of all bindings."""
        return {each.topic for each in self._bindings.values()}

    def find(self, key: str, headers: HeaderPairs = ()) -> list[Binding]:
        """Return the bindings that a message matches, by topic.

        Raises:
            ConfigError: too many patterns may match; the text says how many.
        """
        return sorted(self._index.find(key, headers), key=str)

    def topics(self, key: str, headers: HeaderPairs = ()) -> tuple[str, ...]:
        """Return the topics that a message goes to, each once; raises as `find`."""
        if self.kind is ExchangeKind.HEADERS:
            return _topics(self._index.find(key, headers))
        return remembered(self._find, key if self.has_keys else "")

    def _remember(self) -> None:
        """Forget what was found before a change: this function is another one."""
        index = self._index
        self._find = lambda key: index.find(key, ())


@lru_cache(RESULTS_REMEMBERED_MAX)
def remembered(find: Callable[[str], Iterable[Binding]], key: str) -> tuple[str, ...]:
    """Return the topics of what `find` finds for a key."""
    return _topics(find(key))


def _topics(bindings: Iterable[Binding]) -> tuple[str, ...]:
    return tuple(sorted({binding.topic for binding in bindings}))
