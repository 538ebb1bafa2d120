"""Work queues beside MetaQ's own Java producers and consumers."""

import threading
from collections import Counter

import pytest

from metaq.client import Client
from tests.java.client import JavaClient, Listener
from tests.rigs.waiting import wait_until

COUNT = 300


@pytest.mark.parametrize(
    ("topic", "java_group"), [("worked", "log-readers"), ("worked-by-name", "by-name")]
)
def test_java_puts_and_reads_what_workers_take(
    java: JavaClient, ours: Client, topic: str, java_group: str
) -> None:
    """A log group of Java's gets each message once, and takes none from the queue.

    Also one by the queue group's own name, which Java cannot be refused.
    """
    group = "work" if topic == "worked" else java_group
    done, returned = Counter[bytes](), set[bytes]()
    is_over = threading.Event()

    def work() -> None:
        with ours.queue(topic, group=group, then="drop") as queue:
            while not is_over.is_set():
                for message in queue.receive_many(10, timeout=0.1):
                    if message.data.endswith(b"7") and message.data not in returned:
                        returned.add(message.data)
                        message.nack(delay=0.2)
                    else:
                        message.ack()
                        done[message.data] += 1

    workers = [threading.Thread(target=work) for _ in range(2)]
    listener = Listener()
    sent = [b"%d" % number for number in range(COUNT)]
    try:
        workers[0].start()
        java.put(topic, *sent[: COUNT // 3])
        consumer = java.consumer(java_group, topic, listener)
        java.put(topic, *sent[COUNT // 3 : 2 * COUNT // 3])
        workers[1].start()
        java.put(topic, *sent[2 * COUNT // 3 :])
        wait_until(lambda: len(done) == len(listener.received) == COUNT)
    finally:
        is_over.set()
        for worker in workers:
            worker.join()
    consumer.shutdown()
    assert done == Counter(sent)
    assert returned == {data for data in sent if data.endswith(b"7")}
    assert Counter(listener.data) == Counter(sent)
    found = ours.admin().describe_queue_group(group)
    assert not any(one.open_count or one.floor < one.end for one in found.queues)
