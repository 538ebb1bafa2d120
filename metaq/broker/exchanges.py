"""The exchanges of a broker: which it serves, and why it does not serve others.

A name is a topic's or an exchange's. Where both are defined the topic stays, because it
may have messages.
"""

import logging
from collections.abc import Callable, Collection, Mapping
from typing import Final

from metaq.broker.topics import ServedExchange, Topics
from metaq.model import is_internal
from metaq.routing.match import Matcher, remembered
from metaq.zk.exchange_definitions import ExchangeDefinition

_log = logging.getLogger(__name__)

BINDINGS_ALL_MAX: Final = 50_000
"""Bindings of all exchanges of a broker."""


class Exchanges:
    """Applies definitions of exchanges. Owner: the broker, on the loop."""

    def __init__(self, topics: Topics, on_change: Callable[[], None]) -> None:
        """Serve none yet; `on_change` is called after some came, changed or went."""
        self.problems: tuple[str, ...] = ()
        self._on_change = on_change
        self._topics = topics
        self._applied: dict[str, ExchangeDefinition] = {}
        self._taken: Collection[str] = ()

    def apply(
        self, defined: Mapping[str, ExchangeDefinition], taken: Collection[str]
    ) -> None:
        """Put definitions in effect: of each exchange what has changed.

        Args:
            defined: the exchanges that are not deleted.
            taken: names of topics.
        """
        if (defined, taken) == (self._applied, self._taken):
            return
        served, problems, count = dict[str, ServedExchange](), list[str](), 0
        has_changed = False
        for name, each in sorted(defined.items()):
            count += len(each.bindings)
            if reason := _refusal(name, taken, count):
                problems.append(f"exchange '{name}' is not served: {reason}")
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
        self._applied, self._taken = {**defined}, taken
        before = self._topics.exchanges
        if served != before:
            remembered.cache_clear()  # of those that have gone
            self._topics.set_exchanges(served)
        if has_changed or served.keys() != before.keys():
            self._on_change()


def _refusal(name: str, taken: Collection[str], count: int) -> str:
    if is_internal(name):
        return "names that begin with '__' are the broker's own"
    if name in taken:
        return "a topic has that name; delete one of the two"
    if count > BINDINGS_ALL_MAX:
        return f"expected at most {BINDINGS_ALL_MAX} bindings on a broker, got {count}"
    return ""
