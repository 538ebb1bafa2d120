"""RocketMQ as a peer: a single broker that syncs before it answers (SYNC_FLUSH).

Servers and clients are RocketMQ's own, in Java. `Rocket.java` drives them; Janino
compiles it at run time. Its clients send lists where possible, and ack all messages of
a pop by one request.
"""

import os
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from subprocess import PIPE, Popen
from typing import Self

from bench import delays, filtering, finding
from bench.figures import PAYLOAD, Figure, Turns, WithLines
from bench.lines import Payloads
from bench.processes import killed
from bench.queue_load import Job, Side
from metaq.testing.servers import reserve_port
from metaq.zk.embedded import find_java
from tests.java.jars import Artifact, find_jars

SERVER = Artifact("org.apache.rocketmq", "rocketmq-broker", "5.3.3")
JARS = (
    SERVER,
    SERVER._replace(name="rocketmq-namesrv"),
    SERVER._replace(name="rocketmq-client"),
    Artifact("org.codehaus.janino", "janino", "3.1.12"),
)
SOURCE = Path(__file__).with_name("Rocket.java")
SERVER_JAVA = ("-Xms2g", "-Xmx2g", "-XX:+UseG1GC")
CLIENT_JAVA = ("-Xms512m", "-Xmx512m", "-XX:+UseG1GC")
OPENED = ("java.base/java.nio", "java.base/sun.nio.ch", "java.base/java.lang")
"""Java packages that RocketMQ's own script opens."""
QUEUES = 32
"""Queues of the topic of a work queue; fewer are slower."""
WARM_UPS = 3
"""Rounds until Java has compiled the code."""
SPREAD_MS = round(30 * delays.HOUR_S * 1000)
AHEAD_S = 40.0
"""Time for sending timed messages, one by one, before the first one is due."""

NAMES = """\
listenPort={names}
bindAddress=127.0.0.1
"""
BROKER = """\
brokerName=rocket
brokerIP1=127.0.0.1
bindAddress=127.0.0.1
listenPort={port}
haListenPort={replicas}
namesrvAddr=127.0.0.1:{names}
storePathRootDir={data}
storePathCommitLog={data}/commitlog
flushDiskType=SYNC_FLUSH
waitTimeMillsInSendQueue=60000
maxTransferCountOnMessageInMemory=10000
maxTransferBytesOnMessageInMemory=4194304
timerWheelEnable=true
timerPrecisionMs=100
"""
LOGGING = """\
<configuration>
  <appender name="file" class="ch.qos.logback.core.FileAppender">
    <file>{home}/rocketmq.log</file>
    <encoder><pattern>%d %p %c{{1}} - %m%n</pattern></encoder>
  </appender>
  <logger name="ROOT" level="WARN"><appender-ref ref="file"/></logger>
</configuration>
"""


def command(home: Path, options: tuple[str, ...], *words: object) -> list[str]:
    """Return the command line of a role of `Rocket.java`.

    Raises:
        NoJarsError: the jars are not available.
    """
    logging = home / "logging.xml"
    logging.write_text(LOGGING.format(home=home))
    return [
        find_java(), *options,
        *(f"--add-opens={package}=ALL-UNNAMED" for package in OPENED),
        f"-Duser.home={home}", f"-Drocketmq.home.dir={home}",
        f"-Drmq.logback.configurationFile={logging}",
        "-cp", os.pathsep.join(map(str, find_jars(*JARS))),
        "org.codehaus.janino.SimpleCompiler", str(SOURCE), "Rocket",
        *map(str, words),
    ]  # fmt: skip


class Rocket:
    """Name server and broker in one process. A context manager."""

    def __init__(self, home: Path, queues: int = QUEUES) -> None:
        home.mkdir(parents=True)
        ports = {name: reserve_port(self) for name in ("names", "port", "replicas")}
        self.address = f"127.0.0.1:{ports['names']}"
        self._home = home
        files = {"names": NAMES, "broker": BROKER}
        for name, text in files.items():
            (home / name).write_text(text.format(**ports, data=home / "data"))
        words = "serve", *(home / name for name in files), queues
        self._command = command(home, SERVER_JAVA, *words)

    def __enter__(self) -> Self:
        with (self._home / "error").open("wb") as log:
            self._child = Popen(self._command, stdout=PIPE, stderr=log)
        assert self._child.stdout is not None
        while (line := self._child.stdout.readline()) != b"ready\n":
            assert line, (self._home / "error").read_text()
        self.pid = self._child.pid
        return self

    def __exit__(self, *_error: object) -> None:
        with killed(self._child):
            assert self._child.stdout is not None
            self._child.stdout.close()


class Talk:
    """A client that carries out orders. A context manager."""

    def __init__(self, rocket: Rocket, home: Path, payloads: Payloads) -> None:
        lines = home / "sent"
        lines.write_bytes(b"\n".join(payloads.data))
        self._command = command(home, CLIENT_JAVA, "talk", rocket.address, lines)

    def __enter__(self) -> Self:
        self._child = Popen(self._command, stdin=PIPE, stdout=PIPE)
        return self

    def __exit__(self, *_error: object) -> None:
        with killed(self._child):
            assert self._child.stdin is not None
            assert self._child.stdout is not None
            self._child.stdin.close()
            self._child.stdout.close()

    def ask(self, *words: object) -> float:
        """Send an order; return its numeric result."""
        assert self._child.stdin is not None
        assert self._child.stdout is not None
        self._child.stdin.write(f"{' '.join(map(str, words))}\n".encode())
        self._child.stdin.flush()
        while not (line := self._child.stdout.readline()).startswith(b"= "):
            assert line, self._command[-3:]
        return float(line[2:])


@contextmanager
def rocket(home: Path) -> Iterator[Side]:
    """Run the servers, for a work queue.

    Raises:
        NoJarsError: the jars are not available.
    """
    with Rocket(home) as server:
        yield Side("rocketmq", server.address, server.pid)


def produce(job: Job) -> None:
    """Replace this process by the Java producer, which sends lists."""
    become("produce", job, job.lines, job.count)


def work(job: Job) -> None:
    """Replace this process by the Java program with all workers."""
    become("work", job, job.workers, job.prefetch)


def become(role: str, job: Job, *words: object) -> None:
    home = Path(job.board).parent
    line = command(home, CLIENT_JAVA, role, job.address, job.board, *words)
    os.execv(line[0], line)


def due(directory: Path, payloads: Payloads) -> Turns:
    """Messages due within a second, delivered per second: theirs, then ours."""
    with (
        talking(directory, payloads) as talk,
        closing(delays.burst(directory, payloads)) as ours,
    ):
        talk.ask(
            "spread", delays.SENDS, SPREAD_MS
        )  # lets Java compile before times count
        while True:
            begin_ms = round((time.time() + AHEAD_S) * 1000)
            last_ms = talk.ask("due", delays.BURST, begin_ms) - delays.STEP_MS
            yield delays.BURST / (1 + last_ms / 1000), next(ours)[1]


def spread(directory: Path, payloads: Payloads) -> Turns:
    """Messages scheduled per second, with random times: theirs, then ours."""
    with (
        talking(directory, payloads) as talk,
        closing(delays.send(directory, payloads)) as ours,
    ):
        while True:
            yield talk.ask("spread", delays.SENDS, SPREAD_MS), next(ours)[1]


def where(directory: Path, payloads: Payloads) -> Turns:
    """Messages passed over per second by a filter on a tag: theirs, then ours."""
    with (
        talking(directory, payloads) as talk,
        closing(filtering.passed(directory, payloads, index="tag")) as ours,
    ):
        talk.ask("fill", filtering.COUNT)
        matches = filtering.COUNT // filtering.RARE
        while True:
            plain = filtering.COUNT / talk.ask("where", matches)
            yield plain, next(ours)[1]


@contextmanager
def talking(directory: Path, payloads: Payloads) -> Iterator[Talk]:
    """Run the servers with one queue, and a client."""
    home = directory / "rocket"
    with Rocket(home, queues=1) as server, Talk(server, home, payloads) as talk:
        yield talk


def find(directory: Path, rounds: int, *, count: int) -> Figure:
    """Lookups by key: theirs, then ours."""
    figure = Figure(
        f"find the newest {finding.FOUND} of a key among {count:,} messages, p50"
        " (floor: RocketMQ)",
        "ms",
        [],
        at_least="2.0 of it",
        aim="1.0 of it",
        is_ratio=False,
    )
    keys = count // finding.FEW
    with (
        talking(directory, Payloads([PAYLOAD], "")) as talk,
        finding.indexed(directory, count) as client,
    ):
        talk.ask("fill", count, keys)
        for _ in range(rounds):
            figure.floor.append(talk.ask("find", finding.LOOKS, keys))
            figure.broker.append(finding.median_ms(client, finding.INDEXED, count))
    return figure


FIGURES: dict[str, Callable[[Path, int], Figure] | WithLines] = {
    "delay-send-rocketmq": WithLines(
        spread,
        "sends with random times (floor: RocketMQ)",
        "messages/s",
        "1.0",
        "3",
        warm_ups=WARM_UPS,
    ),
    "delay-burst-rocketmq": WithLines(
        due,
        f"{delays.BURST:,} messages due within a second (floor: RocketMQ's timer)",
        "messages/s",
        "1.5",
        "4",
    ),
    "filter-rocketmq": WithLines(
        where,
        "filtered read, 1 % match a tag (floor: RocketMQ)",
        "messages/s",
        "0.5",
        "1.0",
        warm_ups=WARM_UPS,
    ),
    "find-rocketmq": partial(find, count=finding.COUNT),
}
