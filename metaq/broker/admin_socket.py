"""The administration socket: its address and limits, and the client's side of it.

    <dataPath>/admin.sock     mode 0600: opening it gives all rights

One JSON object per line in both directions, UTF-8 (`docs/operations.md` lists the
commands). A request is an object with `command`; its answer has `ok`, and either the
fields of the result or `error`, one sentence.

`call_admin` is the client of the command line: it asks the broker that runs on a data
directory of this machine. It blocks and needs no event loop, so that a command starts
quickly. The broker's side is `admin.py`, which commands do not import.
"""

import json
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from metaq.clock import SystemClock
from metaq.errors import AdminError, StorageError
from metaq.fs import FileSystem, SystemFileSystem

SOCKET_NAME: Final = "admin.sock"
"""Name in the data directory. It does not end in `.meta` and is not a directory, so
neither this broker nor a Java broker takes it for data."""

REQUEST_BYTES_MAX: Final = 8 * 1024
"""Longest request, line end included: a topic's name and a few words."""

REPLY_BYTES_MAX: Final = 64 * 1024 * 1024
"""Longest reply, line end included; a hundred thousand logs fit."""

ADDRESS_BYTES_MAX: Final = 107
"""Longest path that the kernel accepts as the address of a Unix socket."""

RECEIVE_BYTES: Final = 256 * 1024

_CLOCK: Final = SystemClock()


@contextmanager
def short_address(fs: FileSystem, path: Path) -> Iterator[str]:
    """Yield an address of a socket that the kernel accepts, however long its path is.

    A long path is reached through `/proc/self/fd` and a descriptor of its directory;
    unlike a change of the working directory, this does not affect other threads.

    Args:
        fs: the disk.
        path: the socket, existing or not.

    Returns:
        An address that is valid inside the block.

    Raises:
        StorageError: the directory cannot be opened.
    """
    text = str(path)
    if len(text.encode("utf-8", "surrogateescape")) <= ADDRESS_BYTES_MAX:
        yield text
        return
    directory = fs.open_read(path.parent)
    try:
        yield f"/proc/self/fd/{directory.fileno()}/{path.name}"
    finally:
        directory.close()


def call_admin(
    data_path: Path, request: Mapping[str, object], *, timeout_s: float
) -> dict[str, object]:
    """Send one request to the broker of a data directory and return its answer.

    Args:
        data_path: the broker's `dataPath`.
        request: an object with `command`, ready for JSON.
        timeout_s: bound on the whole call, in seconds, above 0.

    Returns:
        The fields of the result, `ok` left out.

    Raises:
        AdminError: no broker runs there, it refused, it did not answer in time (it may
            still carry out the request), or it belongs to another user. The message is
            one sentence.
    """
    line = json.dumps(request).encode() + b"\n"
    if len(line) > REQUEST_BYTES_MAX:
        raise AdminError(
            f"the request is too long: expected at most {REQUEST_BYTES_MAX} bytes,"
            f" got {len(line)}"
        )
    deadline_s = _CLOCK.monotonic_s() + timeout_s
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        _connect(sock, data_path, timeout_s)
        try:
            # A broker that refuses the connection answers without reading a request.
            with suppress(BrokenPipeError):
                sock.sendall(line)
            answer = _receive_line(sock, deadline_s)
        except TimeoutError as error:
            raise AdminError(
                f"the broker at {data_path} did not answer within {timeout_s:g} s;"
                f" it may still carry out the request"
            ) from error
        except OSError as error:
            raise AdminError(
                f"the connection to the broker at {data_path} was lost:"
                f" {error.strerror}"
            ) from error
    return _read_answer(answer, data_path)


def _connect(sock: socket.socket, data_path: Path, timeout_s: float) -> None:
    sock.settimeout(timeout_s)
    try:
        with short_address(SystemFileSystem(), data_path / SOCKET_NAME) as address:
            sock.connect(address)
    except (FileNotFoundError, ConnectionRefusedError, StorageError) as error:
        raise AdminError(
            f"no broker is running on the data directory {data_path}"
        ) from error
    except PermissionError as error:
        raise AdminError(
            f"the broker at {data_path} belongs to another user"
        ) from error
    except OSError as error:
        raise AdminError(
            f"the broker at {data_path} cannot be reached: {error.strerror or error}"
        ) from error


def _receive_line(sock: socket.socket, deadline_s: float) -> bytes:
    """Return the first line without its end; at end of stream, an incomplete line."""
    parts: list[bytes] = []
    size = 0
    while size < REPLY_BYTES_MAX:
        left_s = deadline_s - _CLOCK.monotonic_s()
        if left_s <= 0:
            raise TimeoutError
        sock.settimeout(left_s)
        part = sock.recv(RECEIVE_BYTES)
        if not part:
            break
        line, end, _ = part.partition(b"\n")
        parts.append(line)
        size += len(line)
        if end:
            break
    return b"".join(parts)


def _read_answer(answer: bytes, data_path: Path) -> dict[str, object]:
    try:
        reply = json.loads(answer)
    except (ValueError, RecursionError):
        reply = None
    if not isinstance(reply, dict) or "ok" not in reply:
        raise AdminError(
            f"the process that listens at {data_path / SOCKET_NAME} is not a broker,"
            " or stopped before it answered"
        )
    if reply.pop("ok") is not True:
        raise AdminError(str(reply.get("error", "the broker refused")))
    return reply
