"""Brokers that take the place of others under a task of Spark.

A task is given the addresses of its brokers when it is planned. A replica set may have
another leader before the task is over: one that waits in vain asks the cluster.
"""

import asyncio
import logging
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future
from typing import Final, TypeAlias

from metaq.client.names import parse_address
from metaq.errors import MetaqError
from metaq.model import BrokerAddress, BrokerId
from metaq.spark.clusters import shared_cluster
from metaq.spark.options import WireOptions

LOOK_S: Final = 1.0
"""Seconds without progress after which the cluster is asked, and between two looks."""

FindLeaders: TypeAlias = Callable[
    [Collection[BrokerId]], "Future[Mapping[BrokerId, str]]"
]
"""Begins to ask where brokers are, `meta://host:port`; those away are missing."""

_log = logging.getLogger(__name__)


def leaders_of(wire: WireOptions) -> FindLeaders:
    """Return what asks the cluster of some options; nothing is connected before."""
    return lambda brokers: shared_cluster(wire).find_leaders(brokers)


async def look(
    find: FindLeaders, brokers: Collection[BrokerId]
) -> dict[BrokerId, BrokerAddress]:
    """Return where brokers are; none of them where the cluster cannot be asked."""
    try:
        found = await asyncio.wrap_future(find(brokers))
    except MetaqError as error:
        _log.warning("leaders of brokers are not known: %s", error)
        return {}
    return {broker: parse_address(text) for broker, text in found.items()}


async def follow_leaders(
    find: FindLeaders,
    brokers: Callable[[], Collection[BrokerId]],
    progress: Callable[[], object],
    move: Callable[[BrokerId, BrokerAddress], None],
    *,
    pause_s: float = LOOK_S,
) -> None:
    """Look where brokers are while a task waits in vain; ends by cancellation.

    Args:
        find: asks the cluster.
        brokers: returns those of the task.
        progress: returns what changes with each answer; None while none is waited for.
        move: is called with each address, also with one that is known.
        pause_s: seconds between two looks.
    """
    before: object = None
    while True:
        await asyncio.sleep(pause_s)
        now = progress()
        if now is not None and now == before:
            for broker, address in (await look(find, brokers())).items():
                move(broker, address)
        before = now
