"""RabbitMQ as a peer: a quorum queue of one node, publisher confirms, pika.

A quorum queue syncs its log before it confirms, and logs acks like puts. It does not
answer acks, so an ack counts when it is sent. The server is the system's package, the
client comes from PyPI. `SelectConnection` is pika's fastest way, and faster than
py-amqp.
"""

import importlib
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from subprocess import Popen
from typing import Any

from bench.processes import add_wheels, killed
from bench.queue_load import START_TIMEOUT_S, TICK_S, Feed, Job, Side, Tally
from metaq.testing.servers import reserve_port
from tests.java.jars import NoJarsError

SERVER = Path("/usr/lib/rabbitmq/bin/rabbitmq-server")
"""Debian's program; the script of this name in the PATH runs it as another user."""
PIKA = "pika==1.4.4"
QUEUE = "bench"
QUORUM = {"x-queue-type": "quorum"}
IN_FLIGHT = 1000


def find_pika() -> Any:
    """Return the module `pika`.

    Raises:
        NoJarsError: the wheel is not available.
    """
    add_wheels(PIKA)
    return importlib.import_module("pika")


@contextmanager
def rabbit(home: Path) -> Iterator[Side]:
    """Run a server with an empty queue, and Erlang's port mapper.

    Raises:
        NoJarsError: server or client are not available.
    """
    if not SERVER.exists():
        raise NoJarsError("no RabbitMQ is installed: Debian has it as rabbitmq-server")
    find_pika()
    home.mkdir()
    (home / "plugins").write_text("[].")
    with (home / "output").open("wb") as log:
        mapper_port, port, peer_port = (str(reserve_port(log)) for _ in range(3))
        environment = {
            **os.environ,
            "HOME": str(home),
            "ERL_EPMD_PORT": mapper_port,
            "RABBITMQ_NODENAME": "bench@localhost",
            "RABBITMQ_NODE_IP_ADDRESS": "127.0.0.1",
            "RABBITMQ_NODE_PORT": port,
            "RABBITMQ_DIST_PORT": peer_port,
            "RABBITMQ_MNESIA_BASE": str(home / "data"),
            "RABBITMQ_LOG_BASE": str(home / "log"),
            "RABBITMQ_CONFIG_FILE": str(home / "rabbitmq"),
            "RABBITMQ_ENABLED_PLUGINS_FILE": str(home / "plugins"),
            "RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS": (
                "-kernel inet_dist_use_interface {127,0,0,1}"
            ),
            "RUNNING_UNDER_SYSTEMD": "true",  # no shell in between
        }
        mapper = ["epmd", "-port", mapper_port, "-address", "127.0.0.1"]
        with (
            killed(Popen(mapper, stdout=log, stderr=log)),
            killed(Popen([SERVER], env=environment, stdout=log, stderr=log)) as server,
        ):
            make_queue(int(port))
            yield Side("rabbit", port, server.pid)


def make_queue(port: int) -> None:
    """Create the queue once the server is up."""
    pika = find_pika()
    end_s = time.monotonic() + START_TIMEOUT_S
    while True:
        try:
            place = pika.ConnectionParameters("127.0.0.1", port)
            with pika.BlockingConnection(place) as connection:
                channel = connection.channel()
                channel.queue_declare(QUEUE, durable=True, arguments=QUORUM)
            return
        except (pika.exceptions.AMQPError, OSError):
            if time.monotonic() > end_s:
                raise
            time.sleep(0.2)


def run_channels(job: Job, count: int, begin: Callable[[Any], None]) -> None:
    """Open channels and run the loop of their connection until it is closed."""
    pika = find_pika()

    def open_channels(_connection: Any) -> None:
        for _ in range(count):
            connection.channel(on_open_callback=begin)

    connection: Any = pika.SelectConnection(
        pika.ConnectionParameters("127.0.0.1", int(job.address)),
        on_open_callback=open_channels,
        on_close_callback=lambda *_: connection.ioloop.stop(),
    )
    # Close the connection cleanly, because a cut would lose acks in flight.
    signal.signal(
        signal.SIGTERM,
        lambda *_: connection.ioloop.add_callback_threadsafe(connection.close),
    )
    connection.ioloop.start()


def produce(job: Job) -> None:
    """Publish, with at most `IN_FLIGHT` unconfirmed messages."""
    feed = Feed(job)
    persistent = find_pika().BasicProperties(delivery_mode=2)
    sent = confirmed = 0

    def begin(channel: Any) -> None:
        later = channel.connection.ioloop.call_later

        def publish(data: bytes) -> None:
            nonlocal sent
            channel.basic_publish("", QUEUE, data, persistent)
            sent += 1

        def fill() -> None:
            for data in feed.take(IN_FLIGHT - (sent - confirmed)):
                publish(data)
            if feed.rate and feed.left:
                later(TICK_S, fill)

        def on_confirm(frame: Any) -> None:
            nonlocal confirmed
            assert frame.method.NAME == "Basic.Ack", frame
            if not confirmed:
                feed.wait()
                later(0, fill)
            confirmed = frame.method.delivery_tag
            if not feed.left and confirmed == sent:
                channel.connection.close()
            elif not feed.rate and sent - confirmed <= IN_FLIGHT // 2:
                fill()

        channel.confirm_delivery(on_confirm, lambda _ok: publish(feed.first()))

    run_channels(job, 1, begin)


def work(job: Job) -> None:
    """Consume over one channel per worker, and ack each message."""
    tally = Tally(job)

    def handle(channel: Any, method: Any, _properties: Any, data: bytes) -> None:
        tally.deliver(data)
        channel.basic_ack(method.delivery_tag)
        tally.done()

    def begin(channel: Any) -> None:
        channel.basic_qos(prefetch_count=job.prefetch)
        channel.basic_consume(QUEUE, handle, callback=lambda _ok: tally.ready())

    run_channels(job, job.workers, begin)
