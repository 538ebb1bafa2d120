"""A member in a process of its own, which may be killed or stopped like any process.

The child writes each event of its ledger as a line to its standard output, before it
goes on; a thread of the parent enters them into the ledger of the scene. When the child
is dead, what it read has ended.

    python -m tests.matrix.child_member ZOOKEEPER GROUP TOPIC NAME SESSION_TIMEOUT_S
"""

import base64
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterable, Sequence
from dataclasses import astuple

from metaq.model import BrokerId, Message, MessageId, Offset, TopicPartition
from tests.matrix.ledger import Event, Ledger, readers
from tests.matrix.scene import PROGRESS_S, Member
from tests.rigs.process import ROOT


class _TellingList(list[Event]):
    """Events that are told when they are appended, and not kept."""

    def append(self, event: Event) -> None:
        """Tell one event in one line."""
        _tell(*event)

    def extend(self, events: Iterable[Event]) -> None:
        """Tell several."""
        for event in events:
            self.append(event)


class _TellingLedger(Ledger):
    """The child's side: what it is told is told to the parent."""

    def __init__(self) -> None:
        super().__init__(_TellingList())

    def deliver(self, member: str, messages: Sequence[Message]) -> None:
        """Tell a delivery in one line."""
        rows = [
            (m.offset, m.next_offset, base64.b64encode(m.data).decode())
            for m in messages
        ]
        _tell("messages", messages[0].partition, rows)


def _tell(*words: object) -> None:
    # One write for a whole line: two threads tell, and each line stays whole.
    os.write(sys.stdout.fileno(), json.dumps(words, default=astuple).encode() + b"\n")


class ChildMember(threading.Thread):
    """The parent's side: the process, and the thread that keeps its books."""

    consumer = None

    def __init__(
        self,
        name: str,
        zookeeper: str,
        group: str,
        topic: str,
        ledger: Ledger,
        *,
        session_timeout_s: float,
    ) -> None:
        super().__init__(name=name, daemon=True)
        self.error: BaseException | None = None
        self._ledger = ledger
        self.leaving = threading.Event()
        command = [sys.executable, "-m", __name__, zookeeper, group, topic, name]
        command.append(str(session_timeout_s))
        self._child = subprocess.Popen(
            command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )

    def run(self) -> None:
        assert self._child.stdout is not None
        for line in self._child.stdout:
            kind, *rest = json.loads(line)
            if kind == "messages":
                self._deliver(*rest)
            else:
                member, partition, begin, end, is_whole = rest
                self._ledger.events.append(
                    Event(kind, member, _partition(partition), begin, end, is_whole)
                )
        for partition, member in readers(self._ledger.events).items():
            if member == self.name:
                self._ledger.note("fence", member, [partition])

    def _deliver(
        self, partition: list[object], rows: list[tuple[int, int, str]]
    ) -> None:
        where = _partition(partition)
        messages = [
            Message(
                where.topic,
                base64.b64decode(data),
                None,
                MessageId(0),
                where,
                Offset(begin),
                Offset(end),
            )
            for begin, end, data in rows
        ]
        self._ledger.deliver(self.name, messages)

    @property
    def is_ok(self) -> bool:
        """Whether it lives; who reads what is seen in the ledger."""
        return self._child.poll() is None

    def kill(self) -> None:
        """Kill it as the kernel does, and wait until its books are closed."""
        self._child.kill()
        self._end()

    def stop(self) -> None:
        """Stop it where it is (SIGSTOP)."""
        self._child.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        """Let a stopped one go on."""
        self._child.send_signal(signal.SIGCONT)

    def leave(self) -> None:
        """Let it leave in order, and wait for it."""
        assert self._child.stdin is not None
        self._child.stdin.close()
        self._end()
        assert self._child.returncode == 0

    def _end(self) -> None:
        self._child.wait(PROGRESS_S)
        self.join(PROGRESS_S)
        assert not self.is_alive()
        for pipe in (self._child.stdin, self._child.stdout):
            if pipe is not None:
                pipe.close()


def _partition(fields: list[object]) -> TopicPartition:
    topic, broker, number = fields
    return TopicPartition(str(topic), BrokerId(int(str(broker))), int(str(number)))


def main() -> None:
    """Read as a member until the standard input ends."""
    zookeeper, group, topic, name, session_timeout_s = sys.argv[1:]
    member = Member(
        name,
        zookeeper,
        group,
        topic,
        _TellingLedger(),
        session_timeout_s=float(session_timeout_s),
    )
    member.start()
    sys.stdin.read()
    member.leave()


if __name__ == "__main__":
    main()
