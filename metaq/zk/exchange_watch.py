"""The exchanges of a cluster with their bindings, kept current. Owned by one loop.

Each binding is a separate node, so a change writes one node. The bindings of an
exchange are watched while it exists and is not deleted.
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
    """A watch on all exchanges, and one on the bindings of each."""

    def __init__(
        self, coordinator: Coordinator, paths: NodePaths, on_change: Callable[[], None]
    ) -> None:
        """Start to watch; `on_change` is called on the loop after each change."""
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
        """Whether all exchanges and bindings were read."""
        bindings = self._bindings.values()
        return self._exchanges.is_complete and all(one.is_complete for one in bindings)

    @property
    def values(self) -> dict[str, ExchangeDefinition | str]:
        """Name → exchange, or the reason why it cannot be read; names ascending."""
        values = dict(self._exchanges.values)
        for name, watch in self._bindings.items():
            if isinstance(each := values.get(name), ExchangeDefinition):
                values[name] = with_bindings(each, watch.values)
        return values

    def cancel(self) -> None:
        """End all watches; no callback is called any more. May be repeated."""
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
