"""The bindings of an exchange, and those that a message matches. Pure.

| kind | a binding matches |
|---|---|
| `direct` | its key is the routing key |
| `fanout` | always |
| `topic` | its pattern matches: words with dots, `*` is one word, `#` any number |
| `headers` | the message has all or any of its headers, with that value or any |

An empty routing key has no words. Topic patterns form a trie, which is walked once for
each key, with a set of current nodes; bindings of other kinds are found by their terms,
which are a key or headers. Results are cached by key until a binding changes.
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
"""Header with the routing key of a message; by default the key is the attribute."""
BINDINGS_MAX: Final = 10_000
"""Maximum number of bindings of an exchange."""
KEY_BYTES_MAX: Final = 255
"""Maximum bytes of a routing key, a pattern, and a header's name or value."""
WORDS_MAX: Final = 32
"""Maximum number of words in a pattern. A broker builds the trie of an exchange in one
turn of its loop, with a node for each word that patterns do not share."""
HEADERS_MAX: Final = 16
"""Maximum number of headers of a binding."""
NODES_VISITED_MAX: Final = 50_000
"""Maximum number of trie nodes visited for one routing key, a twentieth of a second.
A few patterns with many `#`, or thousands with a few, exceed it."""
RESULTS_REMEMBERED_MAX: Final = 10_000
"""Size of the cache of topics by routing key (LRU), for all exchanges together."""
ONE: Final = "*"
ANY: Final = "#"


class ExchangeKind(enum.Enum):
    """Rule by which an exchange matches messages with its bindings."""

    DIRECT = "direct"
    FANOUT = "fanout"
    TOPIC = "topic"
    HEADERS = "headers"


@dataclass(frozen=True, slots=True)
class Binding:
    """A topic bound to an exchange, and the condition on its messages."""

    topic: str
    key: str = ""
    """Routing key (`direct`) or pattern (`topic`); "" for the other kinds."""
    headers: tuple[tuple[str, str | None], ...] = ()
    """Names ascending, each with a value or None for any (`headers`); else ()."""
    matches_any: bool = False
    """Whether one matching header suffices; False: all must match."""

    def __str__(self) -> str:
        pairs = [
            name if value is None else f"{name}={value}" for name, value in self.headers
        ]
        joined = (" or " if self.matches_any else " and ").join(pairs)
        return " ".join(filter(None, (self.topic, self.key, joined)))


def check_binding(kind: ExchangeKind, binding: Binding) -> None:
    """Check that an exchange of this kind can have a binding.

    Raises:
        ConfigError: it cannot; the message names the reason.
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
    """Return a CRC-32 of names of bindings; their order does not matter."""
    return zlib.crc32(" ".join(sorted(names)).encode())


def words_of(key: str) -> list[str]:
    """Return the words of a routing key or pattern; none of an empty one."""
    return key.split(".") if key else []


@dataclass(slots=True, eq=False)
class _Node:
    """Node of the trie: the patterns with a common prefix of words."""

    next: "dict[str, _Node]" = field(default_factory=dict)
    bindings: dict[Binding, None] = field(default_factory=dict)
    stays: bool = False
    """Whether the prefix ends with `#`, which matches further words too."""


class _Patterns:
    """Bindings with patterns, as a trie."""

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
            if not (node.next[word].next or node.next[word].bindings):
                del node.next[word]

    def find(self, key: str, _headers: HeaderPairs) -> Iterable[Binding]:
        nodes, count = _with_rests([self._root]), 0
        for word in words_of(key):
            count += len(nodes)
            if count > NODES_VISITED_MAX:
                raise ConfigError(
                    f"routing key '{key[:80]}': expected at most {NODES_VISITED_MAX}"
                    " places in the patterns of its exchange that may match,"
                    f" got {count}"
                )
            after = [node for node in nodes if node.stays]
            after += [node.next[word] for node in nodes if word in node.next]
            after += [node.next[ONE] for node in nodes if ONE in node.next]
            nodes = _with_rests(after)
        return [binding for node in nodes for binding in node.bindings]


def _with_rests(nodes: Iterable[_Node]) -> dict[_Node, None]:
    """Return nodes, and their `#` successors, because `#` may match no word."""
    found: dict[_Node, None] = {}
    for each in nodes:
        node: _Node | None = each
        while node is not None and node not in found:
            found[node] = None
            node = node.next.get(ANY)
    return found


class _Terms:
    """Bindings by their terms: a key, or headers of which any or all must match."""

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
    """The bindings of one exchange. Not thread-safe."""

    def __init__(self, kind: ExchangeKind) -> None:
        """Create a matcher without bindings."""
        self.kind: Final = kind
        self.has_keys: Final = kind in {ExchangeKind.DIRECT, ExchangeKind.TOPIC}
        """Whether routing keys are compared."""
        self.problems: dict[str, str] = {}
        """Name of each invalid binding → the reason."""
        self.checksum = names_checksum(())
        """`names_checksum` of the names of all bindings, invalid ones too."""
        self._index = _Patterns() if kind is ExchangeKind.TOPIC else _Terms(kind)
        self._bindings: dict[str, Binding] = {}
        self._remember()

    def replace(self, bindings: Mapping[str, Binding]) -> None:
        """Replace all bindings.

        Args:
            bindings: bindings by name; a known name means an unchanged binding.
                Bindings that are invalid for this kind go to `problems`.
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
        """Return the bindings that a message matches, sorted by topic.

        Raises:
            ConfigError: more than `NODES_VISITED_MAX` trie nodes would be visited.
        """
        return sorted(self._index.find(key, headers), key=str)

    def topics(self, key: str, headers: HeaderPairs = ()) -> tuple[str, ...]:
        """Return the sorted topics of a message, each once; raises as `find`."""
        if self.kind is ExchangeKind.HEADERS:
            return _topics(self._index.find(key, headers))
        return remembered(self._find, key if self.has_keys else "")

    def _remember(self) -> None:
        """Invalidate cached results: they are keyed by this function, replaced here."""
        index = self._index
        self._find = lambda key: index.find(key, ())


@lru_cache(RESULTS_REMEMBERED_MAX)
def remembered(find: Callable[[str], Iterable[Binding]], key: str) -> tuple[str, ...]:
    """Return the sorted topics of the bindings that `find` returns for a key."""
    return _topics(find(key))


def _topics(bindings: Iterable[Binding]) -> tuple[str, ...]:
    return tuple(sorted({binding.topic for binding in bindings}))
