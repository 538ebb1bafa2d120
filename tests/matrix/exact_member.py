"""A member in a process of its own that copies a topic exactly once.

It pauses at a step when it is asked to, so that something can be killed there.

    python -m tests.matrix.exact_member ZOOKEEPER NAME

Lines to it: `pause STEP`, then `go`; the end of its input has it leave. Lines from it:
`at STEP`, `failed ERROR`.
"""

import asyncio
import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from metaq.client import AsyncClient, LostBranchError, MetaqError
from metaq.client.decisions.member import MemberDecisions
from metaq.client.produce.transaction_branch import BranchParts
from metaq.model import Message
from metaq.zk.decisions import GroupDecisions
from tests.rigs.process import ROOT

GROUP: Final = "copy"
SOURCE: Final = "in"
TARGET: Final = "out"
SESSION_S: Final = 2.0
WAIT_S: Final = 90.0
"""Deadline of everything that must happen; reached only when it never will."""
CALLS: Final[dict[str, tuple[type, str]]] = {
    "token": (GroupDecisions, "make_token"),
    "vote": (BranchParts, "vote"),
    "decide": (GroupDecisions, "decide"),
    "complete": (MemberDecisions, "complete"),
}
STEPS: Final = [f"{when} {call}" for call in CALLS for when in ("before", "after")]
"""Steps of a batch. A vote is one broker's: the other may have given its own, or not. A
broker that is killed after it has not committed."""


def copies_of(message: Message) -> dict[int, bytes]:
    """Return what a message becomes, by broker: at one of two, or at both."""
    number, place = message.offset // 64, message.partition
    data = f"{place.broker_id}-{place.partition} {message.offset}".encode()
    brokers = (0, 1) if number % 3 == 0 else (number % 2,)
    return dict.fromkeys(brokers, data)


# -- the process -----------------------------------------------------------------------


class _Pauses:
    """Pauses at steps, as the parent asks for them."""

    def __init__(self, leave: Callable[[], None]) -> None:
        self._wanted = ""
        self._going = threading.Event()
        self._leave = leave
        for call, (owner, name) in CALLS.items():
            self._wrap(owner, name, call)

    def read(self) -> None:
        """Take what the parent says, to its end."""
        for line in sys.stdin:
            word, _, step = line.strip().partition(" ")
            if word == "pause":
                self._wanted = step
            else:
                self._wanted = ""
                self._going.set()
        self._going.set()
        self._leave()

    def _wrap(self, owner: type, name: str, call: str) -> None:
        real = getattr(owner, name)

        async def paused(*args: Any, **named: Any) -> Any:
            await self._at(f"before {call}")
            result = await real(*args, **named)
            await self._at(f"after {call}")
            return result

        setattr(owner, name, paused)

    async def _at(self, step: str) -> None:
        if self._wanted == step:
            self._wanted = ""
            # One for each pause: the next may be asked for before this one waits.
            going = self._going = threading.Event()
            _say(f"at {step}")
            await asyncio.to_thread(going.wait, WAIT_S)


def _say(line: str) -> None:
    os.write(sys.stdout.fileno(), line.encode() + b"\n")


async def _copy(zookeeper: str, name: str) -> None:
    async with (
        AsyncClient(
            zookeeper,
            session_timeout_s=SESSION_S,
            request_timeout_s=5.0,
            metadata_s=0.5,
        ) as client,
        client.producer(timeout_s=5.0) as producer,
        client.consumer(
            GROUP,
            [SOURCE],
            consumer_id=name,
            commit_interval_s=None,
            start="earliest",
            wait_s=0.5,
        ) as consumer,
    ):
        async for batch in consumer.batches(max_count=20, max_wait_s=0.05):
            try:
                async with producer.exactly_once(batch) as tx:
                    for message in batch:
                        for broker, data in copies_of(message).items():
                            await tx.send(TARGET, data, partition=f"{broker}-0")
            except LostBranchError as error:
                _say(f"failed {error!r}")
            except MetaqError as error:
                print(f"{name}: {error!r}", file=sys.stderr, flush=True)


async def _main() -> None:
    zookeeper, name = sys.argv[1:]
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None
    pauses = _Pauses(lambda: loop.call_soon_threadsafe(task.cancel) and None)
    threading.Thread(target=pauses.read, daemon=True).start()
    try:
        await _copy(zookeeper, name)
    except asyncio.CancelledError:
        return
    except BaseException as error:
        _say(f"failed {error!r}")
        raise


# -- the parent's side -----------------------------------------------------------------


class ExactMember:
    """The process, as its parent has it."""

    def __init__(self, zookeeper: str, name: str, log: Path) -> None:
        """Start it; what it complains about goes to `log`."""
        self.name = name
        self.said: queue.Queue[str] = queue.Queue()
        """Steps at which it has paused."""
        self.failures: list[str] = []
        with log.open("ab") as errors:
            self._child = subprocess.Popen(
                [sys.executable, "-m", __name__, zookeeper, name],
                cwd=ROOT,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                bufsize=1,
            )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def ask(self, line: str) -> None:
        """Send it a line."""
        assert self._child.stdin is not None
        self._child.stdin.write(line + "\n")
        self._child.stdin.flush()

    def signal(self, number: signal.Signals) -> None:
        """Stop it where it is, or have it go on."""
        self._child.send_signal(number)

    def kill(self) -> None:
        """Kill it as the kernel does."""
        self._child.kill()
        self._end()

    def leave(self) -> int:
        """Have it leave; return its exit code."""
        assert self._child.stdin is not None
        self._child.stdin.close()
        self._end()
        return self._child.returncode

    @property
    def is_running(self) -> bool:
        """Whether the process is there."""
        return self._child.poll() is None

    def _read(self) -> None:
        assert self._child.stdout is not None
        for line in self._child.stdout:
            word, _, rest = line.strip().partition(" ")
            if word == "at":
                self.said.put(rest)
            else:
                self.failures.append(line.strip())

    def _end(self) -> None:
        try:
            self._child.wait(WAIT_S)
        finally:
            self._child.kill()
            self._child.wait()
        self._reader.join(WAIT_S)
        for pipe in (self._child.stdin, self._child.stdout):
            if pipe is not None:
                pipe.close()


if __name__ == "__main__":
    asyncio.run(_main())
