"""Periodic check that the nodes of a member are still in ZooKeeper.

An operator, a wiped server or a confused member may have deleted them. A member node
comes back; whose owner nodes are gone, the caller is told.
"""

import logging
from collections.abc import Callable, Collection
from functools import partial
from typing import Final

from metaq.client.fan_out import for_each, raise_first
from metaq.client.names import name_some
from metaq.clock import Clock
from metaq.errors import MetaqError
from metaq.model import TopicPartition
from metaq.zk.groups import GroupMembership

log = logging.getLogger(__name__)

CHECK_S: Final = 30.0
"""Interval of the checks, seconds."""


class NodeCheck:
    """Checks that a member's nodes are in ZooKeeper. Owner: the member, on its loop."""

    def __init__(
        self, membership: GroupMembership, topics: Collection[str], *, clock: Clock
    ) -> None:
        """Start with a check that is due.

        Args:
            membership: the member.
            topics: its topics, for a member node that is made again.
            clock: tells when the next check is due.
        """
        self._membership = membership
        self._topics = topics
        self._clock = clock
        self._due_s = 0.0

    def ask_soon(self) -> None:
        """Have the next `find_lost` ask, whenever the last one did."""
        self._due_s = 0.0

    async def find_lost(
        self, active: set[TopicPartition], deadline_s: Callable[[], float]
    ) -> set[TopicPartition]:
        """Return the partitions read and not owned in ZooKeeper, if a check is due.

        Args:
            active: the partitions read, followed as they change meanwhile.
            deadline_s: gives the deadline of a question that is asked now.

        Raises:
            MetaqError: some of it is not known; the check stays due.
        """
        if self._clock.monotonic_s() < self._due_s:
            return set()
        # Whatever is reported from here on asks for another check.
        self._due_s = self._clock.monotonic_s() + CHECK_S
        try:
            lost = await self._ask(active, deadline_s)
        except MetaqError:
            self._due_s = 0.0
            raise
        if lost:
            log.error(
                "owner nodes of ours are gone: group=%s member=%s partitions=%s",
                self._membership.group,
                self._membership.member,
                name_some(lost),
            )
        return lost

    async def _ask(
        self, active: set[TopicPartition], deadline_s: Callable[[], float]
    ) -> set[TopicPartition]:
        if not await self._membership.is_registered(deadline_s=deadline_s()):
            await self._membership.register(self._topics, deadline_s=deadline_s())
        owns = partial(self._membership.owns, deadline_s=deadline_s())
        answers = await for_each(owns, active)
        raise_first(answers)
        lost = {partition for partition, is_ours in answers.items() if not is_ours}
        # The session may have gone meanwhile, with everything that was read.
        return lost & active
