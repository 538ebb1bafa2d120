"""Branches of a transaction in progress: their possible owners."""

from typing import Any

import pytest

from metaq.client import TransactionError
from tests.brokers import StartBroker
from tests.client.worlds import IDLE, WORLDS, payloads

ONE_BROKER = {
    "test_exactly_once_is_not_written_to_metaq_1_4": "metaq's are in test_exactly_once"
}


@pytest.mark.parametrize("world", ["sync", "async"])
def test_exactly_once_is_not_written_to_metaq_1_4(
    start_metaq_1_4: StartBroker, world: str
) -> None:
    """Its messages may come from there: they come again, and nothing is stored."""
    broker: Any = start_metaq_1_4(topics={"in": 1, "out": 1})
    for number in range(3):
        broker.put(b"%d" % number, topic="in")
    manual: dict[str, Any] = {"commit_interval_s": None, **IDLE}
    with (
        WORLDS[world](**broker.client_options) as client,
        client.consumer("g", ["in"], **manual) as consumer,
        client.producer() as producer,
    ):
        batches = consumer.batches(max_count=3, max_wait_s=0.2)
        batch = next(batches)
        with (
            pytest.raises(TransactionError, match=r"broker 0 is a MetaQ 1\.4 broker"),
            producer.exactly_once(batch) as tx,
        ):
            tx.send("out", b"made of them")
        batches.close()
        assert payloads(consumer.receive_many(3, 10, fill=True)) == [b"0", b"1", b"2"]
        assert payloads(client.browse("out")) == []
