"""Some messages of each partition, bounded in number."""

import pytest

from metaq.client import Client
from metaq.pipeline.decode.sample import read_sample
from metaq.testing.embedded import embedded_broker
from tests.spark.brokers import TOPIC, numbered, publish, tp

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(("count", "wanted"), [(4, [2, 2]), (6, [2, 4]), (99, [2, 9])])
def test_a_later_partition_has_what_an_earlier_one_lacks(
    count: int, wanted: list[int]
) -> None:
    with embedded_broker(topics={TOPIC: 2}) as broker:
        publish(broker, numbered(2))
        publish(broker, numbered(9, 100), partition=tp(1))
        with Client(brokers=[broker.address]) as client:
            found = read_sample(
                client, TOPIC, ["0-0", "0-1"], count=count, start="earliest"
            )
    assert found == numbered(wanted[0]) + numbered(wanted[1], 100)
