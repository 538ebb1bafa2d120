"""Administration through a Unix-domain socket in the data directory.

Theory of operation. The mode of the socket is set before it is bound, it is bound under
a temporary name, and renamed once it listens. So other users can never open it, and it
accepts connections as soon as it has its name. The rename replaces a socket left over
from a killed broker; a socket that still accepts connections makes the start fail.
Operations on the directory run on a thread because its disk may hang.

Each connection is one task that reads a line, acts and writes a line, in turn. Line
length, number of connections and waits are bounded; a client that exceeds a bound gets
an error where possible, and its connection is closed. An exception in an order
(`orders.py`) becomes its answer and never ends the broker.

Keep in step: `admin_socket.py`.
"""

import asyncio
import json
import logging
import os
import socket
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import Final

from metaq.broker.admin_socket import REQUEST_BYTES_MAX, SOCKET_NAME, short_address
from metaq.broker.health import Figures
from metaq.errors import AdminError, MetaqError, StorageError
from metaq.fs import FileSystem
from metaq.fs.helper_threads import HelperThreads
from metaq.lifecycle import Service, State

CONNECTION_COUNT_MAX: Final = 16
"""Maximum number of open connections."""
REQUEST_TIMEOUT_S: Final = 30.0
"""Maximum wait for a request, and for the client to take an answer, in seconds."""
SOCKET_MODE: Final = 0o600
TEMPORARY_NAME: Final = f"{SOCKET_NAME}.tmp"

_log = logging.getLogger(__name__)


class AdminServer(Service):
    """Server of the socket. Owned by the app, which has the data directory locked."""

    def __init__(
        self,
        fs: FileSystem,
        data_path: Path,
        perform: Callable[[Figures], Awaitable[Figures]],
        *,
        stop_timeout_s: float,
        request_timeout_s: float = REQUEST_TIMEOUT_S,
    ) -> None:
        """Prepare a server.

        Args:
            fs: the disk.
            data_path: an existing directory, locked by this process.
            perform: carries out a request; see `orders.perform`.
            stop_timeout_s: maximum duration of `stop`.
            request_timeout_s: maximum wait for a client; see `REQUEST_TIMEOUT_S`.
        """
        super().__init__("admin", stop_timeout_s=stop_timeout_s)
        self.path: Final = data_path / SOCKET_NAME
        self._fs = fs
        self._perform = perform
        self._request_timeout_s = request_timeout_s
        self._connection_count = 0
        self._helper = HelperThreads(1, "metaq-admin")

    async def on_start(self) -> None:
        """Bind and listen.

        Raises:
            AdminError: another broker answers there, or the socket cannot be made.
        """
        # The stop needs this thread too, when there may be no memory to create one.
        self._helper.begin()
        self.on_way_down("helper", self._helper.end)
        sock = await self._make_socket()
        server = await asyncio.start_unix_server(
            self._on_connection, sock=sock, limit=REQUEST_BYTES_MAX
        )

        async def close() -> None:
            # Remove the name first: a client without a file fails at once.
            try:
                await self._remove_name()
            finally:
                server.close()

        self.on_way_down("socket", close)

    async def _make_socket(self) -> socket.socket:
        binding = asyncio.wrap_future(self._helper.submit(self._bind))
        try:
            return await asyncio.shield(binding)
        except asyncio.CancelledError:
            # The thread cannot be cancelled; close the socket that it makes.
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
        """Return a socket that listens under its final name; blocks."""
        temporary = self.path.with_name(TEMPORARY_NAME)
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._refuse_live_socket()
            # Linux gives the new file the mode of the socket. Setting the umask would
            # affect the whole process, in which other threads create files.
            os.fchmod(sock.fileno(), SOCKET_MODE)
            self._fs.discard(temporary)
            with short_address(self._fs, temporary) as address:
                sock.bind(address)
            sock.listen(CONNECTION_COUNT_MAX)
            self._fs.rename(temporary, self.path)
        except (OSError, StorageError) as error:
            sock.close()
            raise AdminError(
                f"administration socket cannot be created: path={self.path}"
                f" error={error}"
            ) from error
        except AdminError:
            sock.close()
            raise
        return sock

    def _refuse_live_socket(self) -> None:
        """Raise AdminError if the name is taken, unless by a stale socket."""
        if not self._fs.exists(self.path):
            return
        if not self.path.is_socket():
            raise AdminError(
                "the administration socket cannot replace a file that is not a socket:"
                f" {self.path}"
            )
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            probe.setblocking(False)
            try:
                with short_address(self._fs, self.path) as address:
                    probe.connect(address)
            except ConnectionRefusedError:
                return
            except BlockingIOError:
                pass  # Alive: its backlog is full.
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
            # Closes after unsent bytes; waits as long as for a request.
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
        """Answer requests until the client closes the connection, or one is too long.

        Raises:
            OSError: the connection is lost, or the client has exceeded the timeout.
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
            pass  # The client has closed the connection.

    async def _answer(self, line: bytes) -> bytes:
        """Carry out one request; return the line that answers it."""
        request: Figures = {}
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


def _parse_request(line: bytes) -> Figures:
    """Return the object in a line.

    Raises:
        AdminError: the line is not a JSON object.
    """
    try:
        request = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise AdminError("the request is not JSON") from error
    if not isinstance(request, dict):
        raise AdminError("the request is not a JSON object")
    return request


def _encode_refusal(text: str) -> bytes:
    return json.dumps({"ok": False, "error": text}).encode() + b"\n"
