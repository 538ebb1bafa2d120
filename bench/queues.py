"""Figures of work queues: put, take and ack, end to end, beside three peers.

Puts and acks are answered after a sync. One process sends and one has all the workers,
with the same lines on each side, each in the fastest way of its client (our `produce`
and `work` are here). Our topic has four partitions.
"""

import asyncio
import statistics
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

from bench.committing import cluster
from bench.figures import TOPIC, Turns, WithLines
from bench.lines import Payloads
from bench.queue_load import Feed, Job, Round, Side, Tally, run_round
from bench.rabbit import rabbit
from bench.redis_streams import redis
from bench.rocketmq import WARM_UPS, rocket
from metaq.client import AsyncClient, Client

PARTITIONS = 4
GROUP = "bench-workers"
MANY = 500
TIMEOUT_S = 60.0

QUEUE = Job(count=100_000, workers=16, prefetch=32)
ONE_IN_FLIGHT = Job(count=50_000, workers=64, prefetch=1)
LATENCY = Job(count=30_000, workers=16, prefetch=32, rate=5000)

Peer = Callable[[Path], AbstractContextManager[Side]]


@contextmanager
def ours(directory: Path) -> Iterator[Side]:
    """Run our broker and ZooKeeper."""
    with cluster(directory, PARTITIONS) as (address, broker):
        yield Side("queues", address, broker.pid)


def produce(job: Job) -> None:
    """Send one by one without waiting; wait for all at the end."""
    feed = Feed(job)
    with Client(job.address) as client, client.producer(timeout_s=TIMEOUT_S) as sender:
        sender.send(TOPIC, feed.first())
        feed.wait()
        for batch in feed.batches(MANY):
            for data in batch:
                sender.send_nowait(TOPIC, data)
        sender.flush(TIMEOUT_S)


def work(job: Job) -> None:
    """Run the workers on one event loop."""
    asyncio.run(work_all(job))


async def work_all(job: Job) -> None:
    """Run the workers; messages that arrive together are acked by one call."""
    tally = Tally(job)
    is_one_by_one = job.prefetch == 1 or bool(job.rate)

    def count(_ack: asyncio.Future[None]) -> None:
        tally.done()

    async def work_one(client: AsyncClient) -> None:
        async with client.queue(
            TOPIC, group=GROUP, then="drop", prefetch=job.prefetch
        ) as queue:
            tally.ready()
            if is_one_by_one:
                async for message in queue:
                    tally.deliver(message.data)
                    message.ack_nowait().add_done_callback(count)
            while True:
                many = await queue.receive_many(job.prefetch)
                await queue.ack_many(many)
                tally.done(len(many))

    async with AsyncClient(job.address) as client, asyncio.TaskGroup() as tasks:
        for _ in range(job.workers):
            tasks.create_task(work_one(client))


def beside(
    directory: Path,
    payloads: Payloads,
    *,
    peer: Peer,
    job: Job,
    value: Callable[[Round], float],
) -> Turns:
    """A round of the peer, then one of ours.

    Raises:
        NoJarsError: the peer is not available.
    """
    lines = directory / "lines"
    lines.write_bytes(b"\n".join(payloads.data))
    job = replace(job, lines=str(lines))
    with peer(directory / "peer") as theirs, ours(directory / "ours") as mine:
        while True:
            plain, other = (
                value(run_round(side, job, directory)) for side in (theirs, mine)
            )
            yield plain, other


def rate_of(one: Round) -> float:
    return one.per_second


def percentile_of(one: Round, percent: int) -> float:
    return statistics.quantiles(one.delays_ms, n=100)[percent - 1]


def _rate(peer: Peer, job: Job, at_least: str = "", aim: str = "") -> WithLines:
    return WithLines(
        partial(beside, peer=peer, job=job, value=rate_of),
        f"work queue, {job.workers} workers, prefetch {job.prefetch}"
        f" (floor: {NAMES[peer]})",
        "messages/s",
        at_least,
        aim,
        warm_ups=WARM_UPS if peer is rocket else 1,
    )


def _latency(percent: int) -> WithLines:
    value = partial(percentile_of, percent=percent)
    return WithLines(
        partial(beside, peer=rabbit, job=LATENCY, value=value),
        f"put to delivery to a worker at {LATENCY.rate:,}/s, p{percent}"
        f" (floor: {NAMES[rabbit]})",
        "ms",
        "at most 1.0",
        "at most 0.77",
    )


NAMES: dict[Peer, str] = {
    rabbit: "RabbitMQ, a quorum queue",
    redis: "Redis Streams, appendfsync always",
    rocket: "RocketMQ, pop, SYNC_FLUSH",
}
FIGURES = {
    "queue-rabbit": _rate(rabbit, QUEUE, "3", "6"),
    "queue-redis": _rate(redis, QUEUE, "0.8", "1.5"),
    "queue-rocketmq": _rate(rocket, QUEUE, "3", "6"),
    "queue-one-rabbit": _rate(rabbit, ONE_IN_FLIGHT, "1.0", "2"),
    "queue-one-redis": _rate(redis, ONE_IN_FLIGHT, "0.5", "0.8"),
    "queue-one-rocketmq": _rate(rocket, ONE_IN_FLIGHT),
    "queue-latency-p50": _latency(50),
    "queue-latency": _latency(99),
}
