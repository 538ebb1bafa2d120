"""`metaq topics`: which topics there are, where, and how far they go."""

import asyncio

from metaq.cli import render
from metaq.cli.cluster import Target, nobody_serves
from metaq.client.admin.cluster_admin import know_topics
from metaq.client.cluster.broker_facts import read_closed
from metaq.client.cluster.context import ClientContext
from metaq.client.cluster.metadata_queries import log_range
from metaq.client.cluster.presence import require_all_there
from metaq.client.consume.browse import stats_of_broker
from metaq.client.errors import PartitionsAwayError
from metaq.client.fan_out import for_each
from metaq.cluster_snapshot import ClusterSnapshot
from metaq.errors import MetaqError
from metaq.model import BrokerId, Offset, TopicPartition

COLUMNS = (
    "topic", "partition", "broker", "puts", "gets", "log_start", "log_end", "closed",
)  # fmt: skip


def topics(target: Target, wanted: tuple[str, ...], *, as_json: bool) -> bool:
    """Print one row per partition, also of those that are away.

    Args:
        target: which cluster.
        wanted: names of topics; none of them is all.
        as_json: one object per row.

    Returns:
        False when partitions are away; standard error names them, the rest is shown.

    Raises:
        NoBrokerError: there is no broker, or a topic that was named is nowhere.
    """

    async def look(
        context: ClientContext, deadline_s: float
    ) -> tuple[list[tuple[render.Cell, ...]], list[int], str]:
        target.require_brokers(context.metadata.snapshot.brokers)
        known = sorted(await context.metadata.topics(deadline_s=deadline_s))
        names = wanted or known
        snapshot = await know_topics(context, names, deadline_s=deadline_s)
        partitions: list[TopicPartition] = []
        for topic in names:
            found = _partitions(snapshot, topic)
            if not found and wanted:
                raise nobody_serves(topic, known)
            partitions += found

        async def ask(partition: TopicPartition) -> tuple[Offset, Offset] | None:
            if context.address_of(partition.broker_id) is None:
                return None
            return await log_range(context, partition, deadline_s=deadline_s)

        async def ask_closed(broker_id: BrokerId) -> frozenset[str] | None:
            address = context.address_of(broker_id)
            if address is None:
                return None
            told = await stats_of_broker(context, address, "", deadline_s=deadline_s)
            return read_closed(told or {})

        async with asyncio.TaskGroup() as both:
            asking = both.create_task(for_each(ask, partitions))
            brokers = dict.fromkeys(each.broker_id for each in partitions)
            closed = both.create_task(for_each(ask_closed, brokers))
        rows = [
            _row(
                context,
                snapshot,
                each,
                asking.result()[each],
                closed.result()[each.broker_id],
            )
            for each in partitions
        ]
        marked = [
            index
            for index, each in enumerate(partitions)
            if not snapshot.is_served(each)
        ]
        try:
            require_all_there(snapshot, names)
        except PartitionsAwayError as error:
            return rows, marked, str(error)
        return rows, marked, ""

    rows, marked, problem = target.run(look)
    render.print_rows(COLUMNS, rows, as_json=as_json, marked=marked)
    if problem:
        render.say(problem)
    return not problem


def _partitions(snapshot: ClusterSnapshot, topic: str) -> list[TopicPartition]:
    served = {*snapshot.put_partitions(topic), *snapshot.get_partitions(topic)}
    return sorted(served.union(snapshot.away(topic)))


def _row(
    context: ClientContext,
    snapshot: ClusterSnapshot,
    partition: TopicPartition,
    ends: tuple[Offset, Offset] | MetaqError | None,
    closed: frozenset[str] | MetaqError | None,
) -> tuple[render.Cell, ...]:
    if isinstance(ends, MetaqError):
        render.say(f"{partition}: {ends}")
        ends = None
    if isinstance(closed, MetaqError):
        closed = None  # the same broker, and the same sentence
    topic, name = partition.topic, f"{partition.topic}-{partition.partition}"
    return (
        topic,
        partition.name,
        str(context.address_of(partition.broker_id) or "unreachable"),
        partition in snapshot.put_partitions(topic),
        partition in snapshot.get_partitions(topic),
        ends[0] if ends else None,
        ends[1] if ends else None,
        None if closed is None else name in closed,
    )
