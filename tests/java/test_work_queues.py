"""Work queues and filters beside MetaQ's own Java producers and consumers."""

import threading
from collections import Counter

import pytest

from metaq.client import Client, GroupInUseError
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


def test_java_beside_a_filter_gets_everything(java: JavaClient, ours: Client) -> None:
    """As a group of its own, and as a member: then of its partitions.

    A member with a filter does not join a group of Java's, where it would commit past
    what that one wants.
    """
    names, others = [b"%d" % n for n in range(60)], [b"java-%d" % n for n in range(30)]
    with ours.producer() as producer:
        for number, name in enumerate(names):
            producer.send("sifted", name, tag="odd" if number % 2 else "even")
    java.put("sifted", *others)
    odd = set(names[1::2])
    alone, beside, mine = Listener(), Listener(), set[bytes]()
    readers = java.consumer("sifting-java", "sifted", alone)
    where = "tag = 'odd'"
    with ours.queue("sifted", group="sifters", then="drop", where=where) as queue:
        while len(mine) < len(odd):
            for message in queue.receive_many(100):
                message.ack()
                mine.add(message.data)
        assert queue.receive(0.3) is None
    assert mine == odd
    wait_until(lambda: len(alone.received) == len(names + others))
    assert Counter(alone.data) == Counter(names + others)
    with pytest.raises(GroupInUseError, match="no filter"):
        ours.consumer("sifting-java", ["sifted"], where=where).__enter__()
    readers.shutdown()

    mine.clear()
    with ours.consumer("sifting", ["sifted"], where=where) as consumer:
        while len(mine) < len(odd):
            mine.update(message.data for message in consumer.receive_many(100))
        member = java.consumer("sifting", "sifted", beside)
        admin = ours.admin()
        wait_until(lambda: len(admin.describe_group("sifting").members) == 2)
        assert admin.describe_group("sifting").where == where
        later = [b"later-%d" % number for number in range(60)]

        def is_complete() -> bool:
            mine.update(message.data for message in consumer.receive_many(100, 0.1))
            return {*later[1::2]} <= mine | {*beside.data}

        with ours.producer() as producer:
            for number, name in enumerate(later):
                producer.send("sifted", name, tag="odd" if number % 2 else "even")
        wait_until(is_complete)
    member.shutdown()
    assert mine <= odd | {*later[1::2]}
    assert {*later} & {*beside.data}
