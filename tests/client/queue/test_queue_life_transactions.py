"""Acks in local transactions, in both worlds: output and ack are one."""

import threading
from typing import Any

import pytest

from metaq.client import (
    AlreadySettledError,
    ClosedError,
    LeaseLostError,
    QueueGroupError,
    TransactionError,
    TransactionRolledBackError,
)
from metaq.testing.embedded import EmbeddedBroker, embedded_broker
from tests.client.queue.conftest import run_until, send
from tests.client.worlds import QUICK, WORLDS
from tests.rigs.waiting import wait_until

DROP: dict[str, Any] = {"group": "g", "then": "drop"}
SHORT: dict[str, Any] = {**DROP, "lease_s": 1.0, "handle_s_max": 0.1, "prefetch": 1}
"""Of a worker that loses its message; one that takes more may have it once more."""
WAIT_S = 60.0


def made(client: Any, topic: str = "dead") -> list[bytes]:
    return [each.data for each in client.browse(topic)]


@pytest.mark.slow
def test_a_commit_settles_the_message_with_the_output(client: Any) -> None:
    """Once: it is settled from the ack on, and is never delivered again."""
    send(client, "single", b"a")
    with client.producer() as producer, client.queue("single", **DROP) as queue:
        message = queue.receive(WAIT_S)
        with producer.transaction() as tx:
            tx.send("dead", b"made of a")
            tx.ack(message)
            for settle in (message.ack, message.nack, lambda: tx.ack(message)):
                with pytest.raises(AlreadySettledError, match="settled before"):
                    settle()
            assert made(client) == []
        assert made(client) == [b"made of a"]
        with pytest.raises(AlreadySettledError):
            message.ack()
        statistics = queue.statistics()
        assert (statistics.acked_count, statistics.held_count) == (1, 0)
    with client.queue("single", group="g") as again:
        assert again.receive(0.5) is None


@pytest.mark.slow
def test_an_ack_may_begin_the_transaction_and_have_a_message_twice_never(
    client: Any,
) -> None:
    """It binds it to the broker of the message; many go into one."""
    send(client, "single", *[b"%d" % n for n in range(9)])
    with client.producer() as producer, client.queue("single", **DROP) as queue:
        with producer.transaction() as tx:
            for _ in range(9):
                message = queue.receive(WAIT_S)
                tx.ack(message)
                tx.send("dead", message.data)
        assert made(client) == [b"%d" % n for n in range(9)]
        assert queue.statistics().acked_count == 9


@pytest.mark.slow
@pytest.mark.parametrize("how", ["rollback", "exception", "time"])
def test_after_a_rollback_the_message_is_here_again(how: str, client: Any) -> None:
    """It is renewed, and may be settled as if it had not been acked."""
    send(client, "single", b"a")
    with (
        client.producer() as producer,
        client.queue("single", lease_s=5.0, **DROP) as queue,
    ):
        message = queue.receive(WAIT_S)
        before = message.lease_until
        tx = producer.transaction(timeout=3 if how == "time" else 30)
        if how == "exception":
            with pytest.raises(ZeroDivisionError), tx:
                tx.send("dead", b"%d" % (tx.ack(message) or 1 // 0))
        else:
            tx.send("dead", b"x")
            tx.ack(message)
            if how == "time":
                threading.Event().wait(3.8)  # the time of the transaction
                with pytest.raises(TransactionRolledBackError):
                    tx.commit()
            else:
                tx.rollback()
        wait_until(lambda: message.lease_until > before)
        with client.queue("single", group="g") as other:
            assert other.receive(0.1) is None
        assert made(client) == []
        assert queue.statistics().held_count == 1
        message.nack(delay=0)
        again = queue.receive(WAIT_S)
        assert (again.data, again.deliveries) == (b"a", 2)
        with producer.transaction() as tx:
            tx.ack(again)


@pytest.mark.slow
def test_a_message_that_is_lost_fails_the_transaction(client: Any) -> None:
    """Another worker makes the output."""
    send(client, "single", b"a")
    with (
        client.producer() as producer,
        client.queue("single", **SHORT) as queue,
    ):
        message = queue.receive(WAIT_S)
        with client.queue("single", group="g") as other:
            again = other.receive(WAIT_S)
            tx = producer.transaction()
            tx.send("dead", b"first")
            with pytest.raises(LeaseLostError, match="it was delivered again"):
                tx.ack(message)
            with pytest.raises(
                TransactionRolledBackError, match="it was delivered again"
            ):
                tx.commit()
            assert queue.statistics().held_count == 0
            with producer.transaction() as tx:
                tx.send("dead", b"second")
                tx.ack(again)
        assert made(client) == [b"second"]
        assert queue.statistics().lost_count == 1


@pytest.mark.slow
def test_a_rollback_after_the_end_of_a_worker_holds_nothing(client: Any) -> None:
    """There is no one to renew its lease."""
    send(client, "single", b"a")
    with client.producer() as producer:
        tx = producer.transaction()
        with client.queue("single", **DROP) as queue:
            tx.ack(queue.receive(WAIT_S))
        tx.rollback()
        assert queue.statistics().held_count == 0


@pytest.mark.slow
def test_run_leaves_alone_what_its_handler_acked_in_a_transaction(client: Any) -> None:
    """One that fails is returned, with the delay of the group."""
    send(client, "single", b"a", b"b")
    failed = []
    with (
        client.producer() as producer,
        client.queue("single", retry_delays_s=(0.0,), **DROP) as queue,
    ):

        def handle(message: Any) -> None:
            with producer.transaction() as tx:
                tx.send("dead", message.data)
                tx.ack(message)
                if not failed:
                    failed.append(message.data)
                    raise ValueError("once")

        run_until(queue, handle, lambda each: each.acked_count == 2)
        assert sorted(made(client)) == [b"a", b"b"]


@pytest.mark.slow
def test_wrong_uses_are_refused_in_a_sentence(
    client: Any, broker: EmbeddedBroker, request: pytest.FixtureRequest
) -> None:
    """Another broker's or client's message, no message, after the block."""
    send(client, "single", b"a", b"b")
    world = WORLDS[request.node.callspec.params["client"]]
    far = embedded_broker(
        topics={"far": 1}, zookeeper=broker.zookeeper, settings={"brokerId": "1"}
    )
    with far, client.producer() as producer, client.queue("single", **DROP) as queue:
        first, second = queue.receive(WAIT_S), queue.receive(WAIT_S)
        tx = producer.transaction()
        with pytest.raises(TypeError, match="expected a message of a queue, got str"):
            tx.ack("x")
        tx.send("far", b"x")
        text = r"single/0-0: message at offset 0: it is of broker 0, .* to broker 1"
        with pytest.raises(
            TransactionError, match=text + ": begin a transaction with this ack"
        ):
            tx.ack(first)
        tx.commit()
        with pytest.raises(TransactionError, match="has ended"):
            tx.ack(first)
        first.ack()
        with (
            world(**broker.client_options, **QUICK) as other,
            other.producer() as foreign,
            pytest.raises(AlreadySettledError, match="another client"),
        ):
            foreign.transaction().ack(second)
    with client.producer() as producer, pytest.raises(ClosedError):
        producer.transaction().ack(second)


@pytest.mark.slow
def test_what_is_sent_after_an_ack_goes_to_the_broker_of_the_message(
    client: Any, broker: EmbeddedBroker
) -> None:
    """Each partition of its topic at another broker is passed over."""
    send(client, "single", b"a")
    far = embedded_broker(
        topics={"dead": 4}, zookeeper=broker.zookeeper, settings={"brokerId": "1"}
    )
    with far, client.producer() as producer, client.queue("single", **DROP) as queue:
        wait_until(lambda: len(client.partitions("dead")) == 5)
        message = queue.receive(WAIT_S)
        with producer.transaction() as tx:
            tx.ack(message)
            for number in range(9):
                tx.send("dead", b"%d" % number)
        assert [each.partition.name for each in client.browse("dead")] == ["0-0"] * 9


@pytest.mark.slow
def test_an_ack_whose_group_was_deleted_says_so_as_any(client: Any) -> None:
    """The group is named, and nothing is stored."""
    send(client, "single", b"a")
    admin = client.admin()
    with client.producer() as producer, client.queue("single", **DROP) as queue:
        message = queue.receive(WAIT_S)
        admin.delete_queue_group("g")
        wait_until(lambda: "group" not in admin.broker_stats(0, "queues"))
        gone = pytest.raises(QueueGroupError, match="has queue group 'g' as it was")
        with gone, producer.transaction() as tx:
            tx.send("dead", b"x")
            tx.ack(message)
    assert made(client) == []
