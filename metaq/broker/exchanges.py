"""Decides which exchanges a broker serves, and why it does not serve the others.

A name belongs to a topic or to an exchange. If both are defined, the topic is served,
because it may have messages.
"""

import logging
from collections.abc import Callable, Collection, Mapping
from typing import Final

from metaq.broker.topics import ServedExchange, Topics
from metaq.model import is_internal, no_items
from metaq.routing.match import Matcher, remembered
from metaq.zk.exchange_definitions import ExchangeDefinition

_log = logging.getLogger(__name__)

BINDINGS_ALL_MAX: Final = 50_000
"""Maximum number of bindings of all exchanges of a broker."""


class Exchanges:
    """Applies definitions of exchanges. Owned by the broker; used on the loop."""

    def __init__(self, topics: Topics, on_change: Callable[[], None]) -> None:
        """Serve none yet; `on_change` is called after exchanges have changed."""
        self.problems: tuple[str, ...] = ()
        self._on_change = on_change
        self._topics = topics
        self._applied: dict[str, ExchangeDefinition] = {}
        self._beside: tuple[Collection[str], Mapping[str, str]] = (), {}

    def apply(
        self,
        defined: Mapping[str, ExchangeDefinition],
        taken: Collection[str],
        unread: Mapping[str, str] = no_items(),  # stays empty
    ) -> None:
        """Put definitions in effect, updating only changed exchanges.

        Args:
            defined: definitions by name, including deleted ones.
            taken: names of topics.
            unread: name → why the definition of another exchange cannot be read.
        """
        if (defined, (taken, unread)) == (self._applied, self._beside):
            return
        served, problems, count = dict[str, ServedExchange](), list[str](), 0
        unserved = {name: unread[name] for name in unread if name not in taken}
        former = {name for name, each in defined.items() if each.is_deleted}
        has_changed = False
        for name, each in sorted(defined.items()):
            if each.is_deleted:
                continue
            count += len(each.bindings)
            if reason := _refusal(name, each, taken, count):
                problems.append(f"exchange '{name}' is not served: {reason}")
                if name not in taken:
                    unserved[name] = reason
                continue
            known = self._topics.exchanges.get(name)
            if known is None or known.matcher.kind is not each.kind:
                known = ServedExchange(name, Matcher(each.kind), None)
            matcher = known.matcher
            served[name] = ServedExchange(name, matcher, each.alternate)
            if self._applied.get(name) != each or name not in self._topics.exchanges:
                matcher.replace(each.bindings)
                has_changed = True
                _log.info(
                    "exchange in effect: exchange=%s bindings=%d",
                    name,
                    len(each.bindings),
                )
            problems += [
                f"binding '{each.bindings[one]}' of exchange '{name}' is not in effect:"
                f" {text}"
                for one, text in matcher.problems.items()
            ]
        self.problems = tuple(problems)
        self._applied, self._beside = {**defined}, (taken, {**unread})
        before = self._topics.exchanges
        if served != before:
            remembered.cache_clear()  # it may hold matchers of removed exchanges
        self._topics.set_exchanges(served, unserved, former)
        if has_changed or served.keys() != before.keys():
            self._on_change()


def _refusal(
    name: str, definition: ExchangeDefinition, taken: Collection[str], count: int
) -> str:
    if is_internal(name):
        return "names that begin with '__' are reserved for brokers"
    if name in taken:
        return "a topic has that name; delete one of the two"
    if count > BINDINGS_ALL_MAX:
        return f"expected at most {BINDINGS_ALL_MAX} bindings on a broker, got {count}"
    if definition.unread:  # its topic would silently lack messages
        each = min(definition.unread)
        return f"binding {each} cannot be read: {definition.unread[each]}"
    return ""
