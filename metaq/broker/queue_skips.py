"""Skipping a damaged range of a queue, by order of an operator.

A queue stops at a damaged record and waits, because a backup or another replica may
have it. Only an order makes it continue: messages that begin in the damaged range then
count as done. That is stored in `__queues`, so a restart and the next leader skip the
range as well.
"""

import logging
from dataclasses import asdict, dataclass

from metaq.broker.context import BrokerContext
from metaq.broker.internal_logs import note_damage
from metaq.broker.queue_groups import QueueOwner
from metaq.broker.queue_part import ServedQueue
from metaq.errors import AdminError
from metaq.model import Offset
from metaq.storage.log_removal import outcome_of

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Skip:
    """The damaged range at which a queue has stopped."""

    start: Offset
    end: Offset
    """The next good offset."""
    open_count: int
    """Messages in the range that were found before the damage and are not done."""
    file: str
    reason: str


async def skip_damage(
    service: QueueOwner,
    context: BrokerContext,
    queue: ServedQueue,
    agreed: tuple[int, int] | None,
) -> dict[str, object]:
    """Return the damage at which a queue has stopped, and skip it if `agreed` names it.

    Args:
        service: service of the queue.
        context: context of the broker.
        queue: the queue; used on the loop.
        agreed: start and end of the range to skip; None: change nothing.

    Returns:
        The fields of `Skip`. A skip is stored on return.

    Raises:
        AdminError: the queue is not at damage, is at another range, or another replica
            may have the bytes.
        MetaqError: the log cannot be read, or the skip cannot be stored.
    """
    if queue.problem:
        await note_damage(queue.log, queue.state.scan_offset)
    skip = _find(context, queue)
    if agreed is not None:
        if agreed != (skip.start, skip.end):
            raise AdminError(
                f"{queue}: the damage is now from {skip.start} to {skip.end}, got"
                f" {agreed[0]} to {agreed[1]}: nothing was skipped"
            )
        await _pass_over(service, queue, skip)
    return asdict(skip)


def _find(context: BrokerContext, queue: ServedQueue) -> Skip:
    state, log = queue.state, queue.log
    for damage in log.damage:
        start = max(damage.offset, state.floor)
        end = damage.next_good_offset or log.high_watermark
        count = state.count_in(start, end)
        if end <= start or not (count or start <= state.scan_offset < end):
            continue
        if context.replica is not None and damage not in log.lost:
            raise AdminError(
                f"{queue}: another replica may have the damaged bytes from {start} to"
                f" {end}: wait until they are mended, or until alarm log_lost reports"
                " that no replica has them"
            )
        return Skip(start, Offset(end), count, str(damage.path), damage.detail)
    raise AdminError(f"{queue}: there is no damage to skip")


async def _pass_over(service: QueueOwner, queue: ServedQueue, skip: Skip) -> None:
    queue.state.skip(skip.start, skip.end)
    error = await outcome_of(queue.store)
    if error is not None:
        raise error
    _log.warning(
        "queue group skips damage by command: group=%s partition=%s start=%d end=%d"
        " open=%d file=%s",
        queue.name.group,
        queue.log.log_id,
        skip.start,
        skip.end,
        skip.open_count,
        skip.file,
    )
    service.on_settled(queue)
