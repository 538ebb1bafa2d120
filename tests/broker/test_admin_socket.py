"""The client's side of the administration socket: whom it asks, and what it refuses."""

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from metaq.broker.admin_socket import REQUEST_BYTES_MAX, SOCKET_NAME, call_admin
from metaq.errors import AdminError

TIMEOUT_S = 30.0


@contextmanager
def listening(path: Path, answer: bytes | None) -> Iterator[None]:
    """Something that is not a broker: it says `answer`, or nothing, to one caller."""
    with socket.socket(socket.AF_UNIX) as sock:
        sock.bind(str(path / SOCKET_NAME))
        sock.listen()

        def serve() -> None:
            peer, _ = sock.accept()
            with peer:
                peer.recv(100)
                if answer is None:
                    peer.recv(100)  # until the caller gives up
                else:
                    peer.sendall(answer)

        thread = threading.Thread(target=serve)
        thread.start()
        yield
        thread.join()


def test_no_broker_is_one_sentence(data_dir: Path, tmp_path: Path) -> None:
    """No socket, a stale one and no directory are all told alike."""
    with socket.socket(socket.AF_UNIX) as killed:
        killed.bind(str(data_dir / SOCKET_NAME))
    empty = tmp_path / "empty"
    empty.mkdir()
    for path in (data_dir, empty, tmp_path / "absent", tmp_path / ("x" * 120)):
        with pytest.raises(
            AdminError, match="no broker is running on the data directory"
        ):
            call_admin(path, {"command": "status"}, timeout_s=TIMEOUT_S)


def test_an_answer_that_does_not_come_is_told(data_dir: Path) -> None:
    """The call ends in time and says that the outcome is unknown."""
    with (
        listening(data_dir, None),
        pytest.raises(AdminError, match=r"did not answer within 0\.02 s; it may still"),
    ):
        call_admin(data_dir, {"command": "reload"}, timeout_s=0.02)


@pytest.mark.parametrize("answer", [b"", b"hello\n", b"[]\n", b"{}\n", b"[" * 9000])
def test_what_is_no_broker_is_recognised(data_dir: Path, answer: bytes) -> None:
    """Foreign bytes become an AdminError."""
    with (
        listening(data_dir, answer),
        pytest.raises(AdminError, match="is not a broker"),
    ):
        call_admin(data_dir, {"command": "status"}, timeout_s=TIMEOUT_S)


def test_a_request_that_is_too_long_is_not_sent(data_dir: Path) -> None:
    """The bound is told before a request is sent."""
    request = {"command": "open_partitions", "topic": "t" * REQUEST_BYTES_MAX}
    with pytest.raises(AdminError, match="request is too long"):
        call_admin(data_dir, request, timeout_s=TIMEOUT_S)
