"""Lines of `stats` beyond MetaQ's, which the transcripts hold."""

import asyncio
from pathlib import Path

from metaq.client.cluster.broker_facts import parse_facts
from tests.rigs.broker import Peer, running_broker


def test_what_was_set_over_the_file_is_told_to_clients_without_zookeeper(
    tmp_path: Path,
) -> None:
    """And what is no business of theirs is not."""
    overrides = {
        "orders:numPartitions": "4",
        "mute:acceptPublish": "false",
        "maxTransferSize": "65536",
    }

    async def ask() -> list[str]:
        async with (
            running_broker(tmp_path / "data", overrides=overrides) as broker,
            Peer(broker) as peer,
        ):
            items = [b"", b" topics", b" offsets", b" config"]
            replies = [await peer.ask(b"stats%b\r\n" % item) for item in items]
            return [reply.split(b"\r\n", 1)[1].decode() for reply in replies]

    broker, topics, offsets, config = asyncio.run(ask())
    assert "maxTransferSize" not in broker
    facts = parse_facts(
        broker=broker, topics=topics, offsets=offsets, config=config, source="it"
    )
    assert facts.partition_count("orders") == 4
    assert not facts.takes_puts("mute")
    assert facts.takes_puts("orders")
