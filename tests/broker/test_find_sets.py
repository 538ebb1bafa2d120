"""Look-ups in a replica set: each replica has an index, and a new leader goes on."""

import asyncio
from dataclasses import replace
from types import MappingProxyType

import pytest

from metaq.protocol.commands import Find
from metaq.protocol.encoding import encode
from metaq.record.flags import encode_payload
from metaq.record.runs import decode_runs
from metaq.storage.key_index import keys_path
from tests.replication.replicas import SOON_S, Replicas, replicas, soon

COUNT = 40


def give_index(rig: Replicas, number: int) -> None:
    """Have a replica index the key of its topic."""
    broker = rig[number].broker
    assert broker is not None
    config = broker.context.config
    topic = replace(config.topic("test"), index=("key",))
    topics = MappingProxyType({**config.topics, "test": topic})
    broker.context.config = replace(config, topics=topics)


def has_index(rig: Replicas, number: int) -> bool:
    """Return whether all sealed segments of a replica have an index."""
    log = rig[number].log()
    assert log is not None
    files = [keys_path(each.path, each.base_offset) for each in log.segments.sealed]
    return len(files) > 2 and all(rig[number].disk.exists(path) for path in files)


async def find(rig: Replicas, number: int) -> list[int]:
    """Return the numbers of the messages with a key, as a replica has them."""
    command = encode(Find("test", 0, b"key=k1", 9, 1000))
    until_s = asyncio.get_running_loop().time() + SOON_S
    while True:
        reply = await rig.ask(number, command)
        if reply.startswith(b"value "):
            runs = decode_runs(reply.partition(b"\r\n")[2])
            return [int(run.data.rpartition(b"k1")[2]) for run in runs]
        assert reply.startswith(b"result 503 "), reply
        assert asyncio.get_running_loop().time() < until_s, reply
        await asyncio.sleep(0.05)


@pytest.mark.slow
def test_a_new_leader_finds_what_the_one_before_found() -> None:
    """By an index that it has made as a follower."""

    async def main() -> None:
        settings = {"maxSegmentSize": "400", "replicaLagTimeoutMs": "2000"}
        # On a busy machine a look-up that takes long goes on in a next one.
        times = {"metaq.broker.handlers.find.WORK_S": 60.0}
        async with replicas(settings=settings, times=times) as rig:
            for number in (1, 2, 3):
                give_index(rig, number)
            for number in range(COUNT):
                payload, flag = encode_payload(
                    b"%d" % number, None, b"k%d" % (number % 2)
                )
                await rig.store(payload, flag=flag)
            await rig.equal()
            for number in (1, 2, 3):
                await soon(lambda number=number: has_index(rig, number), rig.describe)
            leader = rig.leader()
            wanted = list(range(COUNT - 1, 0, -2))
            assert await find(rig, leader) == wanted
            epoch = rig[leader].node.epoch
            rig.zookeeper.reap(await rig[leader].kill())
            await rig.led(after=epoch)
            assert rig.leader() != leader
            assert await find(rig, rig.leader()) == wanted

    asyncio.run(main())
