"""The nodes of a fake broker in ZooKeeper: those of ours that MetaQ has, too."""

from collections.abc import Callable
from dataclasses import replace
from typing import Final

from metaq.clock import Clock
from metaq.zk.paths import NodePaths
from metaq.zk.plan import BrokerSnapshot
from metaq.zk.registry import BrokerRegistry
from metaq.zk.session import Coordinator

REGISTER_TIMEOUT_S: Final = 10.0
"""Bound on what start and stop wait for ZooKeeper."""


class FakeRegistration:
    """Owner: one fake broker; used on its loop. Without ZooKeeper it does nothing."""

    def __init__(
        self,
        make_coordinator: Callable[[Clock], Coordinator] | None,
        root: str,
        clock: Clock,
    ) -> None:
        """Prepare; nothing is connected before `register`.

        Args:
            make_coordinator: makes the session; None: there is no ZooKeeper.
            root: MetaQ's root.
            clock: for deadlines.
        """
        self._make_coordinator = make_coordinator
        self._paths = NodePaths(root)
        self._clock = clock
        self._registry: BrokerRegistry | None = None
        self._coordinator: Coordinator | None = None

    async def register(self, snapshot: BrokerSnapshot) -> None:
        """Be registered as `snapshot` says; returns when that is so."""
        if self._make_coordinator is None:
            return
        if self._coordinator is None:
            self._coordinator = self._make_coordinator(self._clock)
            self._coordinator.start()
        await self.withdraw()
        self._registry = BrokerRegistry(
            self._coordinator, self._paths, clock=self._clock
        )
        self._registry.start()
        await self._registry.register(
            replace(snapshot, has_record=False), deadline_s=self._deadline_s()
        )

    def update(self, snapshot: BrokerSnapshot) -> None:
        """Be registered otherwise, soon."""
        if self._registry is not None:
            self._registry.update(replace(snapshot, has_record=False))

    async def withdraw(self) -> None:
        """Remove the nodes; the session stays."""
        if self._registry is not None:
            await self._registry.withdraw(deadline_s=self._deadline_s())
            await self._registry.stop()
            self._registry = None

    async def stop(self) -> None:
        """End the session."""
        if self._coordinator is not None:
            await self._coordinator.stop(deadline_s=self._deadline_s())
            self._coordinator = None

    def _deadline_s(self) -> float:
        return self._clock.monotonic_s() + REGISTER_TIMEOUT_S
