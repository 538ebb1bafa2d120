"""New leaders of replica sets, for running Spark tasks.

A task gets the addresses of its brokers when it is planned. A replica set may change
its leader before the task ends: a task without progress asks the cluster.
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
"""Seconds without progress after which the cluster is asked; interval of the checks."""

FindLeaders: TypeAlias = Callable[
    [Collection[BrokerId]], "Future[Mapping[BrokerId, str]]"
]
"""Looks up the addresses of brokers, `meta://host:port`; omits those away."""

_log = logging.getLogger(__name__)


def leaders_of(wire: WireOptions) -> FindLeaders:
    """Return a function that asks the options' cluster; it connects when called."""
    return lambda brokers: shared_cluster(wire).find_leaders(brokers)


async def look(
    find: FindLeaders, brokers: Collection[BrokerId]
) -> dict[BrokerId, BrokerAddress]:
    """Return the addresses of brokers; {} if the cluster is not available."""
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
    """Look up the brokers of a task while it makes no progress; ends by cancellation.

    Args:
        find: asks the cluster.
        brokers: returns the brokers of the task.
        progress: returns a value that changes with each answer; None while the task
            waits for no answer.
        move: called with the address of each broker, also if it has not changed.
        pause_s: seconds between checks.
    """
    before: object = None
    while True:
        await asyncio.sleep(pause_s)
        now = progress()
        if now is not None and now == before:
            for broker, address in (await look(find, brokers())).items():
                move(broker, address)
        before = now
