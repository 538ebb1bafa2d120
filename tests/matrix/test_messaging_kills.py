"""Queue, delay, exchange and filter together, while processes are killed and stopped.

A producer sends to an exchange, half of it with a time; all of it goes to one topic,
and what is a job to a second one as well, of which a queue group takes what has a tag.
What is not told to the producer may be in a topic or not, and is there once at most.
"""

import time
from collections import Counter
from functools import partial
from pathlib import Path
from random import Random
from typing import Final

import pytest

from metaq.client import Client
from tests.cluster.handled import Orders
from tests.integration.conftest import ZooKeeperServer
from tests.integration.registered import wait_registered
from tests.matrix.queue_book import Place
from tests.matrix.test_queue_kills import (
    DRAIN_S,
    FAULT_KINDS,
    FAULTS,
    WORKERS,
    Shop,
    open_shop,
    root,
)
from tests.rigs.waiting import wait_until

__all__ = ["root"]

ALL: Final = "all"
EXCHANGE: Final = "events"
WANTED: Final = ":work:job:"
JUMPS_MS: Final = tuple(
    sign * hours * 3_600_000 for sign in (1, -1) for hours in (1, 10 * 365 * 24)
)

pytestmark = [
    pytest.mark.crash,
    pytest.mark.slow,
    pytest.mark.zookeeper,
    pytest.mark.timeout(900 + 30 * FAULTS),
]


def set_clock(orders: Path, shop: Shop) -> None:
    """The wall clock of the broker is wrong for a while."""
    Orders(clock_ms=shop.random.choice(JUMPS_MS)).write(orders)
    time.sleep(shop.random.choice([0.3, 1.5]))
    Orders().write(orders)


def check_sent(shop: Shop) -> None:
    """Wait until all that was answered is there; each is once where it goes to."""
    rows = shop.book.read()
    sent = {each["data"] for each in rows if each["event"] == "sent"}
    tried = {each["data"] for each in rows if each["event"] == "sends"}
    wanted = {ALL: sent, shop.topic: {data for data in sent if ":job:" in data}}
    with Client(shop.zookeeper) as client:

        def missing() -> set[str]:
            return {
                f"{topic}: {data}"
                for topic, datas in wanted.items()
                for data in datas - {one.data.decode() for one in client.browse(topic)}
            }

        wait_until(
            lambda: not missing(),
            DRAIN_S,
            lambda: f"{sorted(missing())[:9]}; see {shop.book.path}",
        )
        for topic in wanted:
            messages = [*client.browse(topic)]
            counts = Counter(one.data.decode() for one in messages)
            assert not {data: n for data, n in counts.items() if n > 1}, topic
            assert counts.keys() <= tried
            for one in messages:
                if topic == shop.topic and WANTED in one.data.decode():
                    shop.book.note("put", place=Place.of(one))
    assert sent


def check_taken(shop: Shop) -> None:
    """Workers had nothing before its time, and nothing that is not theirs."""
    rows = shop.book.read()
    due = {each["data"]: each["due"] for each in rows if each["event"] == "sends"}
    for each in rows:
        if each["event"] == "took":
            assert WANTED in each["data"]
            assert each["at"] >= due[each["data"]], f"early: {each}"


def test_faults_lose_nothing_and_repeat_nothing_in_all_of_it_together(
    zookeeper_alone: ZooKeeperServer, root: str, tmp_path: Path, rng: Random
) -> None:
    """Settled once, in the order of keys, at its time, once in each topic."""
    orders = tmp_path / "orders.json"
    Orders().write(orders)
    with open_shop(
        zookeeper_alone,
        root,
        tmp_path,
        rng,
        (0,),
        program=("tests.cluster.handled", str(orders)),
        more_topics=[ALL],
        ordered_by="key",
        where="tag = 'work'",
    ) as shop:
        shop.producer_kind, shop.producer_to = "router", EXCHANGE
        wait_registered(root)
        with Client(root) as client:
            admin = client.admin()
            admin.create_exchange(EXCHANGE)
            admin.bind(EXCHANGE, ALL, key="#")
            admin.bind(EXCHANGE, shop.topic, key="*.job")
        for _ in range(WORKERS):
            shop.hire()
        shop.start_producer()
        shop.go_on()
        faults = [*FAULT_KINDS, partial(set_clock, orders)]
        for number in range(FAULTS):
            fault = rng.choice(faults)
            shop.book.note("fault", number=number, fault=str(fault))
            fault(shop)
            shop.book.note("mended", number=number)
            shop.go_on()
        assert shop.producer is not None
        shop.producer.stop()
        shop.producer = None
        check_sent(shop)
        shop.finish()
        check_taken(shop)
