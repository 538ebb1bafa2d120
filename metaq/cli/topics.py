"""`metaq topics`: which topics there are, where, and how far they go."""

from metaq.cli import render
from metaq.cli.cluster import Target, nobody_serves
from metaq.client.admin import know_topics
from metaq.client.context import ClientContext
from metaq.client.fan_out import for_each
from metaq.client.questions import log_range
from metaq.errors import MetaqError
from metaq.model import Offset, TopicPartition
from metaq.zk.cluster import ClusterSnapshot
from metaq.zk.paths import partition_name

COLUMNS = ("topic", "partition", "broker", "puts", "gets", "log_start", "log_end")


def topics(target: Target, wanted: tuple[str, ...], *, as_json: bool) -> None:
    """Print one row per partition.

    Args:
        target: which cluster.
        wanted: names of topics; none of them is all.
        as_json: one object per row.

    Raises:
        NoBrokerError: there is no broker, or a topic that was named is nowhere.
    """

    async def look(
        context: ClientContext, deadline_s: float
    ) -> list[tuple[render.Cell, ...]]:
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

        ends = await for_each(ask, partitions)
        return [_row(context, snapshot, each, ends[each]) for each in partitions]

    render.print_rows(COLUMNS, target.run(look), as_json=as_json)


def _partitions(snapshot: ClusterSnapshot, topic: str) -> list[TopicPartition]:
    return sorted({*snapshot.put_partitions(topic), *snapshot.get_partitions(topic)})


def _row(
    context: ClientContext,
    snapshot: ClusterSnapshot,
    partition: TopicPartition,
    ends: tuple[Offset, Offset] | MetaqError | None,
) -> tuple[render.Cell, ...]:
    if isinstance(ends, MetaqError):
        render.say(f"{partition}: {ends}")
        ends = None
    topic = partition.topic
    return (
        topic,
        partition_name(partition),
        str(context.address_of(partition.broker_id) or "unreachable"),
        partition in snapshot.put_partitions(topic),
        partition in snapshot.get_partitions(topic),
        ends[0] if ends else None,
        ends[1] if ends else None,
    )
