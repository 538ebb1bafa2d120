"""The exchanges of a cluster with their bindings, kept current; owned by one loop.

A binding is a node of its own, so a change costs one node. The bindings of an exchange
are watched as long as it is there and not deleted.
"""

from collections.abc import Callable
from functools import partial

from metaq.routing.match import Binding
from metaq.zk.children import ValuesWatch
from metaq.zk.definitions import or_error
from metaq.zk.exchange_definitions import (
    ExchangeDefinition,
    decode_binding,
    decode_exchange,
    with_bindings,
)
from metaq.zk.paths import NodePaths
from metaq.zk.session import Coordinator


class ExchangeWatch:
    """A watch of all exchanges, and one for the bindings of each."""

    def __init__(
        self, coordinator: Coordinator, paths: NodePaths, on_change: Callable[[], None]
    ) -> None:
        """Begin to watch; `on_change` is called on the loop after each change."""
        self._coordinator = coordinator
        self._paths = paths
        self._on_change = on_change
        self._bindings: dict[str, ValuesWatch[Binding | str]] = {}
        self._exchanges: ValuesWatch[ExchangeDefinition | str] = ValuesWatch(
            coordinator,
            paths.exchanges(),
            partial(or_error, decode_exchange),
            self._on_exchanges,
        )

    @property
    def is_complete(self) -> bool:
        """Whether everything was read."""
        bindings = self._bindings.values()
        return self._exchanges.is_complete and all(one.is_complete for one in bindings)

    @property
    def values(self) -> dict[str, ExchangeDefinition | str]:
        """Name → exchange, or why its definition cannot be read; ascending."""
        values = dict(self._exchanges.values)
        for name, watch in self._bindings.items():
            if isinstance(each := values.get(name), ExchangeDefinition):
                values[name] = with_bindings(each, watch.values)
        return values

    def cancel(self) -> None:
        """End it; nothing is delivered any more. May be repeated."""
        self._exchanges.cancel()
        for watch in self._bindings.values():
            watch.cancel()

    def _on_exchanges(self) -> None:
        wanted = {
            name
            for name, each in self._exchanges.values.items()
            if isinstance(each, ExchangeDefinition) and not each.is_deleted
        }
        for name in self._bindings.keys() - wanted:
            self._bindings.pop(name).cancel()
        for name in wanted - self._bindings.keys():
            self._bindings[name] = ValuesWatch(
                self._coordinator,
                self._paths.bindings(name),
                partial(or_error, decode_binding),
                self._on_change,
            )
        self._on_change()
