"""Administration through a Unix-domain socket in the data directory.

Theory of operation. The socket is bound under a temporary name, with its mode set
before it has a name at all, and renamed when it listens. So no other user can open it
for a moment, and it takes connections as soon as it has its name. A name that is left
over from a broker that was killed is replaced by the rename; one that still answers is
not. Operations on the directory run on a thread: its disk may hang.

Each connection is one task that reads a line, acts and writes a line, in turn. Lines,
connections and waits are bounded; a client that breaks a bound is told so where
possible, and closed. An exception of an action is its answer, never the end of the
broker.

Keep in step: `admin_socket.py`, and the table of commands in `docs/operations.md`.
"""

import asyncio
import json
import logging
import os
import socket
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Final, Protocol

from metaq.broker.admin_socket import REQUEST_BYTES_MAX, SOCKET_NAME, short_address
from metaq.broker.health import (
    describe_directories,
    describe_health,
    describe_logs,
    describe_scrub,
)
from metaq.broker.status import BrokerStatus
from metaq.config.load import Reload
from metaq.errors import AdminError, MetaqError, StorageError
from metaq.fs import FileSystem
from metaq.fs.helper_threads import HelperThreads
from metaq.lifecycle import Service, State
from metaq.txn.figures import TransactionView

CONNECTION_COUNT_MAX: Final = 16
"""Administrators at the same time."""
REQUEST_TIMEOUT_S: Final = 30.0
"""Time for which a connection may be silent, and for taking an answer, seconds."""
SOCKET_MODE: Final = 0o600
TEMPORARY_NAME: Final = f"{SOCKET_NAME}.tmp"
COMMANDS: Final = (
    "status",
    "logs",
    "directories",
    "scrub",
    "reload",
    "close_partitions",
    "open_partitions",
    "transactions",
    "end_transaction",
)
"""Every command there is; `docs/operations.md` explains each."""

ENDS: Final = ("commit", "rollback", "complete", "forget")
"""Operations of `end_transaction`."""

_log = logging.getLogger(__name__)


class AdminActions(Protocol):
    """Administrative actions on a broker; implemented by the app.

    Everything is called on the event loop, and all but a reload answered before
    anything else happens.
    """

    async def reload(self) -> Reload:
        """Read the configuration file again and apply its topics and schedules.

        Raises:
            MetaqError: the file is refused, and everything stays as it was.
        """
        ...

    def close_partitions(
        self, topic: str, *, start: int, end: int | None
    ) -> Sequence[int]:
        """Close partitions, and end the waits on them.

        Args:
            topic: a configured topic.
            start: the first one, 0 or more.
            end: the last one, at least `start`; None: the topic's last.

        Returns:
            Every partition of the topic that is closed now, sorted.

        Raises:
            AdminError: no such topic, or no such partition.
        """
        ...

    def open_partitions(
        self, topic: str, *, start: int, end: int | None
    ) -> Sequence[int]:
        """Open partitions again; arguments, result and errors as for closing."""
        ...

    def transactions(self) -> Sequence[TransactionView]:
        """Return every transaction that is not finished, and every outcome."""
        ...

    async def end_transaction(self, key: str, word: str) -> None:
        """Commit, roll back, complete or forget an XA transaction by command.

        Args:
            key: its key.
            word: "commit", "rollback", "complete" or "forget".

        Raises:
            TransactionError: it cannot be done, or not yet; the text says why.
            StorageError: the outcome cannot be written.
        """
        ...

    def status(self) -> BrokerStatus:
        """Return a snapshot of the broker."""
        ...


class AdminServer(Service):
    """Serves administrators. Owner: the app, which holds the data directory's lock."""

    def __init__(
        self,
        fs: FileSystem,
        data_path: Path,
        actions: AdminActions,
        *,
        stop_timeout_s: float,
        request_timeout_s: float = REQUEST_TIMEOUT_S,
    ) -> None:
        """Prepare a server.

        Args:
            fs: the disk.
            data_path: an existing directory, locked by this process.
            actions: implementation of the commands.
            stop_timeout_s: bound on `stop`, in seconds.
            request_timeout_s: bound on the silence of a client, in seconds.
        """
        super().__init__("admin", stop_timeout_s=stop_timeout_s)
        self.path: Final = data_path / SOCKET_NAME
        """The socket."""
        self._fs = fs
        self._actions = actions
        self._request_timeout_s = request_timeout_s
        self._connection_count = 0
        self._helper = HelperThreads(1, "metaq-admin")

    async def on_start(self) -> None:
        """Bind and listen.

        Raises:
            AdminError: another broker answers there, or the socket cannot be made.
        """
        # The stop needs it too, when there may be no memory for another thread.
        self._helper.begin()
        self.on_way_down("helper", self._stop_helper)
        sock = await self._make_socket()
        server = await asyncio.start_unix_server(
            self._on_connection, sock=sock, limit=REQUEST_BYTES_MAX
        )

        async def close() -> None:
            # First the name: a client that finds no file need not wait for an answer.
            try:
                await self._remove_name()
            finally:
                server.close()

        self.on_way_down("socket", close)

    async def _stop_helper(self) -> None:
        self._helper.shutdown(wait=False)

    async def _make_socket(self) -> socket.socket:
        binding = asyncio.wrap_future(self._helper.submit(self._bind))
        try:
            return await asyncio.shield(binding)
        except asyncio.CancelledError:
            # A thread cannot be cancelled, and what it makes must not outlive us.
            with suppress(AdminError):
                (await binding).close()
                await self._remove_name()
            raise

    async def _remove_name(self) -> None:
        """Remove the socket's name."""
        try:
            await asyncio.wrap_future(self._helper.submit(self._fs.unlink, self.path))
        except StorageError as error:
            _log.warning("admin socket not removed: error=%s", error)

    def _bind(self) -> socket.socket:
        """Return a listening socket that has its name; blocks."""
        temporary = self.path.with_name(TEMPORARY_NAME)
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._refuse_live_socket()
            # Linux takes the mode of the new name from the socket itself. The usual
            # umask is for the whole process, and other threads make files meanwhile.
            os.fchmod(sock.fileno(), SOCKET_MODE)
            self._fs.discard(temporary)
            with short_address(self._fs, temporary) as address:
                sock.bind(address)
            sock.listen(CONNECTION_COUNT_MAX)
            self._fs.rename(temporary, self.path)
        except (OSError, StorageError) as error:
            sock.close()
            raise AdminError(
                f"administration socket cannot be made: path={self.path} error={error}"
            ) from error
        except AdminError:
            sock.close()
            raise
        return sock

    def _refuse_live_socket(self) -> None:
        """Raise AdminError where the name is taken by something that is not stale."""
        if not self._fs.exists(self.path):
            return
        if not self.path.is_socket():
            raise AdminError(f"there is a file in the way of the socket: {self.path}")
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            probe.setblocking(False)
            try:
                with short_address(self._fs, self.path) as address:
                    probe.connect(address)
            except ConnectionRefusedError:
                return
            except BlockingIOError:
                pass  # Alive, and its queue of connections is full.
        raise AdminError(f"another broker answers at {self.path}")

    # -- connections

    def _on_connection(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        if self.state not in (State.STARTING, State.RUNNING):
            writer.transport.abort()
            return
        if self._connection_count >= CONNECTION_COUNT_MAX:
            text = f"too many connections: at most {CONNECTION_COUNT_MAX}"
            writer.write(_encode_refusal(text))
            writer.close()
            return
        self._connection_count += 1
        self.spawn(self._run_connection(reader, writer), name="connection")

    async def _run_connection(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        try:
            await self._serve(reader, writer)
            # Behind bytes still on their way, for as long as a client may be silent.
            writer.close()
            async with asyncio.timeout(self._request_timeout_s):
                await writer.wait_closed()
        except OSError as error:
            _log.debug("admin connection lost: error=%r", error)
        finally:
            self._connection_count -= 1
            writer.transport.abort()

    async def _serve(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        """Answer requests until there are no more, or one is too long.

        Raises:
            OSError: the connection is lost, or the client is silent for too long.
        """
        try:
            while True:
                async with asyncio.timeout(self._request_timeout_s):
                    line = await reader.readuntil(b"\n")
                writer.write(await self._answer(line))
                async with asyncio.timeout(self._request_timeout_s):
                    await writer.drain()
        except asyncio.LimitOverrunError:
            text = f"the request is too long: at most {REQUEST_BYTES_MAX} bytes"
            writer.write(_encode_refusal(text))
        except asyncio.IncompleteReadError:
            pass  # The usual end: the client has what it wanted.

    async def _answer(self, line: bytes) -> bytes:
        """Carry out one request; return the line that answers it."""
        request: Mapping[str, object] = {}
        try:
            request = _parse_request(line)
            result = await self._perform(request)
        except MetaqError as error:
            _log.info(
                "admin request refused: command=%s error=%s",
                request.get("command"),
                error,
            )
            return _encode_refusal(str(error))
        except Exception:  # noqa: BLE001  # a bug in one action must not end the broker
            _log.exception("admin request failed: command=%s", request.get("command"))
            return _encode_refusal("internal error, see the broker's log")
        return json.dumps({"ok": True, **result}).encode() + b"\n"

    async def _perform(self, request: Mapping[str, object]) -> Mapping[str, object]:
        actions = self._actions
        match command := request.get("command"):
            case "status":
                return describe_health(actions.status())
            case "logs":
                return {"logs": describe_logs(actions.status())}
            case "directories":
                return {"directories": describe_directories(actions.status())}
            case "scrub":
                return describe_scrub(actions.status())
            case "reload":
                reload = await actions.reload()
                status = actions.status()
                return {
                    "broker_id": status.broker_id,
                    "address": status.address,
                    "data_dir": str(self.path.parent.absolute()),
                    "added": list(reload.topics.added),
                    "removed": list(reload.topics.removed),
                    "changed": list(reload.topics.changed),
                    "needs_restart": list(reload.needs_restart),
                }
            case "close_partitions" | "open_partitions":
                topic, start, end = _read_partitions(request)
                if command == "close_partitions":
                    closed = actions.close_partitions(topic, start=start, end=end)
                else:
                    closed = actions.open_partitions(topic, start=start, end=end)
                _log.info("admin request done: command=%s topic=%s", command, topic)
                return {"closed": {topic: list(closed)}}
            case "transactions":
                views = [asdict(each) for each in actions.transactions()]
                return {"transactions": views}
            case "end_transaction":
                key, word = _read_end(request)
                await actions.end_transaction(key, word)
                _log.info("transaction ended by command: key=%s as=%s", key, word)
                return {"key": key, "as": word}
            case _:
                raise AdminError(
                    f"unknown command {str(command)[:40]!r}: expected one of"
                    f" {', '.join(COMMANDS)}"
                )


def _parse_request(line: bytes) -> Mapping[str, object]:
    """Return the object in a line.

    Raises:
        AdminError: it holds none.
    """
    try:
        request = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise AdminError("the request is no JSON") from error
    if not isinstance(request, dict):
        raise AdminError("the request is no JSON object")
    return request


def _read_partitions(request: Mapping[str, object]) -> tuple[str, int, int | None]:
    """Return topic, first and last partition; None: the last there is.

    Raises:
        AdminError: they are missing or make no sense.
    """
    topic, start, end = (
        request.get("topic"),
        request.get("start", 0),
        request.get("end"),
    )
    if not isinstance(topic, str) or not topic:
        raise AdminError("'topic' is missing")
    # A JSON true is an int in Python, hence the comparison of types.
    if type(start) is not int or not (end is None or type(end) is int):
        raise AdminError("'start' and 'end' are whole numbers")
    if start < 0 or (end is not None and end < start):
        raise AdminError(f"expected 0 <= start <= end, got {start} and {end}")
    return topic, start, end


def _read_end(request: Mapping[str, object]) -> tuple[str, str]:
    """Return the key of a transaction, and how it is to be ended.

    Raises:
        AdminError: they are missing or make no sense.
    """
    key, word = request.get("key"), request.get("as")
    if not isinstance(key, str) or not isinstance(word, str) or word not in ENDS:
        raise AdminError(f"expected 'key', and 'as' one of {', '.join(ENDS)}")
    return key, word


def _encode_refusal(text: str) -> bytes:
    return json.dumps({"ok": False, "error": text}).encode() + b"\n"
