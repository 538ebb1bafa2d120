"""Administration through the Unix socket: who may ask, the answers, the bounds."""

import asyncio
import json
import os
import select
import socket
import stat
import threading
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from pathlib import Path
from typing import cast

import pytest

from metaq.broker.admin import CONNECTION_COUNT_MAX, TEMPORARY_NAME, AdminServer
from metaq.broker.admin_socket import (
    ADDRESS_BYTES_MAX,
    REQUEST_BYTES_MAX,
    SOCKET_NAME,
    call_admin,
)
from metaq.broker.control import Control
from metaq.broker.health import Figures
from metaq.broker.orders import ENDS, ORDERS, perform
from metaq.broker.status import BrokerStatus
from metaq.config.load import Reload
from metaq.config.settings import BrokerConfig, default_data_path
from metaq.errors import AdminError, ConfigError, TransactionError
from metaq.fs import SystemFileSystem
from metaq.txn.figures import TransactionView
from metaq.txn.state import HeuristicOutcome
from tests.broker.figures import HEALTHY
from tests.rigs.waiting import until

TIMEOUT_S = 30.0


class Actions:
    """A broker with its parts in one object, which remembers what it was asked."""

    address = HEALTHY.address

    def __init__(self) -> None:
        self.context = self.topics = self.waiters = self.transactions = self
        self.queues = self
        self.config = BrokerConfig()
        self.calls: list[tuple[object, ...]] = []
        self.reload_error: Exception | None = None
        self.reload_added = "a"
        self.closed: dict[str, tuple[int, ...]] = {}

    async def reload(self) -> Reload:
        if self.reload_error is not None:
            raise self.reload_error
        return Reload(
            config=BrokerConfig(),
            added=(self.reload_added,),
            removed=("r",),
            changed=("c",),
            needs_restart=("[system] brokerId: 0 -> 1",),
        )

    def close_partitions(self, topic: str, *, start: int, end: int | None) -> None:
        self.calls.append(("close", topic, start, end))
        if topic == "nowhere":
            raise AdminError("topic 'nowhere' is not in the configuration")
        self.closed = {topic: (0, 1)}

    def end_topic(self, topic: str) -> None:
        self.calls.append(("end waits", topic))

    def open_partitions(self, topic: str, *, start: int, end: int | None) -> None:
        self.calls.append(("open", topic, start, end))
        self.closed = {}

    def closed_partitions(self) -> dict[str, tuple[int, ...]]:
        return self.closed

    async def skip_damage(self, *asked: object) -> dict[str, object]:
        self.calls.append(("skip", *asked))
        return {"reason": "a flipped bit"}

    def views(self) -> Sequence[TransactionView]:
        return (TransactionView("XID:1:0a::uq", "prepared", 2, 40, ("t-0",), 9, 8),)

    def decide(
        self, key: str, outcome: HeuristicOutcome, on_done: Callable[[object], None]
    ) -> None:
        self.calls.append((outcome.value, key))
        is_known = key == "XID:1:0a::uq"
        on_done(None if is_known else TransactionError("not prepared"))

    def forget(self, key: str, on_done: Callable[[object], None]) -> None:
        self.calls.append(("forget", key))
        on_done(None)

    def status(self) -> BrokerStatus:
        return HEALTHY


def new_server(path: Path, actions: Actions, **options: float) -> AdminServer:
    return AdminServer(
        SystemFileSystem(),
        path,
        partial(perform, cast("Control", actions)),
        stop_timeout_s=TIMEOUT_S,
        **options,
    )


def with_server(
    path: Path,
    body: Callable[[AdminServer], Awaitable[None]],
    actions: Actions | None = None,
    **options: float,
) -> None:
    """Run `body` against a server that is up."""

    async def run() -> None:
        server = new_server(path, actions or Actions(), **options)
        await server.start()
        try:
            await body(server)
        finally:
            await server.stop()

    asyncio.run(run())


async def ask(path: Path, **request: object) -> dict[str, object]:
    return await asyncio.to_thread(call_admin, path, request, timeout_s=TIMEOUT_S)


async def exchange(path: Path, data: bytes) -> list[dict[str, object]]:
    """Send bytes, end the sending side, and return every answer until the end."""
    reader, writer = await asyncio.open_unix_connection(str(path / SOCKET_NAME))
    writer.write(data)
    if writer.can_write_eof():
        writer.write_eof()
    answers = [json.loads(line) async for line in reader]
    writer.close()
    return answers


async def refuse_all(_: object) -> Figures:
    raise AdminError("nothing is done here")


def test_reload_is_answered_with_what_changed(data_dir: Path) -> None:
    """The reply names added, removed and changed topics, and what takes a restart."""

    async def body(_: AdminServer) -> None:
        assert await ask(data_dir, command="reload") == {
            "broker_id": 0,
            "address": "meta://host:8123",
            "data_dir": default_data_path(),
            "added": ["a"],
            "removed": ["r"],
            "changed": ["c"],
            "needs_restart": ["[system] brokerId: 0 -> 1"],
        }

    with_server(data_dir, body)


def test_the_name_is_removed_by_a_thread_of_the_start(data_dir: Path) -> None:
    """Without memory for one at the stop, its start may wait for ever."""

    class Noting(SystemFileSystem):
        def unlink(self, path: Path) -> None:
            removers.append(threading.current_thread())
            super().unlink(path)

    async def run() -> list[threading.Thread]:
        server = AdminServer(Noting(), data_dir, refuse_all, stop_timeout_s=TIMEOUT_S)
        await server.start()
        begun = threading.enumerate()
        await server.stop()
        return begun

    removers = list[threading.Thread]()
    begun = asyncio.run(run())
    assert not (data_dir / SOCKET_NAME).exists()
    assert [each in begun for each in removers] == [True]


@pytest.mark.parametrize(
    ("request_fields", "call"),
    [
        ({"start": 1, "end": 2}, ("close", "test", 1, 2)),
        ({"start": 1}, ("close", "test", 1, None)),
        ({"end": 0}, ("close", "test", 0, 0)),
        ({}, ("close", "test", 0, None)),
        ({"end": None}, ("close", "test", 0, None)),
    ],
)
def test_a_range_may_be_left_open(
    data_dir: Path, request_fields: dict[str, object], call: tuple[object, ...]
) -> None:
    """Without a start it begins at 0, without an end it reaches to the last one."""
    actions = Actions()

    async def body(_: AdminServer) -> None:
        reply = await ask(
            data_dir, command="close_partitions", topic="test", **request_fields
        )
        assert reply == {"closed": {"test": [0, 1]}}

    with_server(data_dir, body, actions)
    assert actions.calls == [call, ("end waits", "test")]


def test_partitions_are_opened_again(data_dir: Path) -> None:
    """The reply shows which partitions are still closed."""
    actions = Actions()

    async def body(_: AdminServer) -> None:
        reply = await ask(data_dir, command="open_partitions", topic="test")
        assert reply == {"closed": {"test": []}}

    with_server(data_dir, body, actions)
    assert actions.calls == [("open", "test", 0, None)]


def test_every_order_of_the_table_is_answered(data_dir: Path) -> None:
    """Each row is, with the fields of its kind."""
    fields = {
        "status": "problems",
        "logs": "logs",
        "directories": "directories",
        "scrub": "is_on",
        "reload": "added",
        "close_partitions": "closed",
        "open_partitions": "closed",
        "skip_damage": "reason",
        "transactions": "transactions",
        "end_transaction": "as",
    }
    more = {"topic": "test", "key": "XID:1:0a::uq", "as": "commit"}
    more |= {"group": "workers", "partition": 0}

    async def body(_: AdminServer) -> None:
        for command in ORDERS:
            reply = await ask(data_dir, command=command, **more)
            assert fields[command] in reply, command

    with_server(data_dir, body)


def test_transactions_are_listed_and_ended(data_dir: Path) -> None:
    """Every field is there; what cannot be done is told, and what is no word, too."""
    actions = Actions()

    async def body(_: AdminServer) -> None:
        (found,) = (await ask(data_dir, command="transactions"))["transactions"]  # type: ignore[misc, attr-defined]
        assert (found["key"], found["put_count"]) == ("XID:1:0a::uq", 2)
        end = {"command": "end_transaction", "key": found["key"]}
        for word in ENDS:
            await ask(data_dir, **end, **{"as": word})
        with pytest.raises(AdminError, match="'as' one of commit"):
            await ask(data_dir, **end)
        end["key"], end["as"] = "XID:1:0b::uq", "commit"
        with pytest.raises(AdminError, match="not prepared"):
            await ask(data_dir, **end)

    with_server(data_dir, body, actions)
    assert actions.calls[:4] == [(word, "XID:1:0a::uq") for word in ENDS]


@pytest.mark.parametrize(
    ("line", "error"),
    [
        (b"{}", "unknown command 'None'"),
        (b'{"command": "stop"}', "unknown command 'stop': expected one of status"),
        (b"nonsense", "not JSON"),
        (b"\xff", "not JSON"),
        (b"[1]", "not a JSON object"),
        (b"[" * 8000, "not JSON"),
        (b'{"command": "close_partitions"}', "'topic' is missing"),
        (b'{"command": "close_partitions", "topic": 7}', "'topic' is missing"),
        (
            b'{"command": "close_partitions", "topic": "t", "start": true}',
            "whole numbers",
        ),
        (
            b'{"command": "close_partitions", "topic": "t", "end": 1.5}',
            "whole numbers",
        ),
        (
            b'{"command": "open_partitions", "topic": "t", "start": -1}',
            "0 <= start <= end, got -1",
        ),
        (
            b'{"command": "open_partitions", "topic": "t", "start": 2, "end": 1}',
            "0 <= start <= end, got 2 and 1",
        ),
        (
            b'{"command": "close_partitions", "topic": "nowhere"}',
            "not in the configuration",
        ),
    ],
)
def test_nonsense_is_refused_in_one_sentence(
    data_dir: Path, line: bytes, error: str
) -> None:
    """A bad request has its answer, and the connection goes on."""

    async def body(_: AdminServer) -> None:
        data = line + b'\n{"command": "status"}\n'
        refusal, after = await exchange(data_dir, data)
        assert refusal["ok"] is False
        assert error in str(refusal["error"])
        assert after["ok"] is True

    with_server(data_dir, body)


def test_a_refused_reload_is_told(data_dir: Path) -> None:
    """The client gets the very sentence that the configuration was refused with."""
    actions = Actions()
    actions.reload_error = ConfigError("server.ini: unknown key 'brokerIdd'")

    async def body(_: AdminServer) -> None:
        with pytest.raises(AdminError, match="unknown key 'brokerIdd'"):
            await ask(data_dir, command="reload")

    with_server(data_dir, body, actions)


def test_a_bug_in_an_action_does_not_end_the_server(
    data_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It is logged with its traceback, and the next request is served."""
    actions = Actions()
    actions.reload_error = ZeroDivisionError("a bug")

    async def body(server: AdminServer) -> None:
        with pytest.raises(AdminError, match="internal error"):
            await ask(data_dir, command="reload")
        assert await ask(data_dir, command="status")
        assert server.failure is None

    with_server(data_dir, body, actions)
    assert "ZeroDivisionError" in caplog.text


def test_only_the_owner_may_open_the_socket(data_dir: Path) -> None:
    """The mode is 0600 whatever the umask of the process is."""
    before = os.umask(0)
    try:

        async def body(server: AdminServer) -> None:
            mode = server.path.stat().st_mode
            assert stat.S_ISSOCK(mode)
            assert stat.S_IMODE(mode) == 0o600

        with_server(data_dir, body)
    finally:
        os.umask(before)


def test_the_socket_is_gone_after_a_stop(data_dir: Path) -> None:
    """Nothing is left in the data directory."""

    async def body(_: AdminServer) -> None:
        assert os.listdir(data_dir) == [SOCKET_NAME]

    with_server(data_dir, body)
    assert os.listdir(data_dir) == []


def test_the_socket_of_a_killed_broker_is_replaced(data_dir: Path) -> None:
    """A stale name, and a stale temporary one, do not keep a broker from starting."""
    for name in (SOCKET_NAME, TEMPORARY_NAME):
        with socket.socket(socket.AF_UNIX) as killed:
            killed.bind(str(data_dir / name))

    async def body(_: AdminServer) -> None:
        assert await ask(data_dir, command="status")

    with_server(data_dir, body)


def test_a_live_socket_is_never_stolen(data_dir: Path) -> None:
    """A second server refuses to start, and the first one goes on."""

    async def body(_: AdminServer) -> None:
        second = new_server(data_dir, Actions())
        with pytest.raises(AdminError, match="another broker answers at"):
            await second.start()
        assert await ask(data_dir, command="status")

    with_server(data_dir, body)


def test_a_live_socket_with_a_full_queue_is_not_stolen_either(data_dir: Path) -> None:
    """A broker that is too busy to accept is alive."""
    with socket.socket(socket.AF_UNIX) as busy:
        busy.bind(str(data_dir / SOCKET_NAME))
        busy.listen(0)
        with socket.socket(socket.AF_UNIX) as queued:
            queued.connect(str(data_dir / SOCKET_NAME))
            with pytest.raises(AdminError, match="another broker answers at"):
                asyncio.run(new_server(data_dir, Actions()).start())


def test_a_file_in_the_way_is_kept(data_dir: Path) -> None:
    """A file that is no socket is never replaced."""
    (data_dir / SOCKET_NAME).write_text("mine")
    with pytest.raises(AdminError, match="cannot replace a file"):
        asyncio.run(new_server(data_dir, Actions()).start())
    assert (data_dir / SOCKET_NAME).read_text() == "mine"


def test_a_missing_directory_is_one_sentence(tmp_path: Path) -> None:
    """The start fails with the path in the message."""
    with pytest.raises(AdminError, match=r"cannot be created: path=.*absent"):
        asyncio.run(new_server(tmp_path / "absent", Actions()).start())


def test_a_path_longer_than_an_address_works(tmp_path: Path) -> None:
    """Both ends reach a socket whose path the kernel would not take."""
    path = tmp_path / ("d" * 60) / ("e" * 60)
    path.mkdir(parents=True)
    assert len(str(path / SOCKET_NAME)) > ADDRESS_BYTES_MAX

    async def body(server: AdminServer) -> None:
        assert server.path.is_socket()
        assert await ask(path, command="status")
        with pytest.raises(AdminError, match="another broker answers at"):
            await new_server(path, Actions()).start()

    with_server(path, body)
    assert os.listdir(path) == []


def test_a_long_line_is_refused(data_dir: Path) -> None:
    """A client that exceeds the bound is told, and closed."""

    async def body(_: AdminServer) -> None:
        (answer,) = await exchange(data_dir, b"x" * (REQUEST_BYTES_MAX + 1))
        assert f"at most {REQUEST_BYTES_MAX} bytes" in str(answer["error"])

    with_server(data_dir, body)


def test_connections_are_bounded(data_dir: Path) -> None:
    """One more than the cap is told so; a place that is free again can be taken."""

    async def body(_: AdminServer) -> None:
        open_ones = [
            await asyncio.open_unix_connection(str(data_dir / SOCKET_NAME))
            for _ in range(CONNECTION_COUNT_MAX)
        ]
        with pytest.raises(AdminError, match="too many connections"):
            await ask(data_dir, command="status")
        for _, writer in open_ones:
            writer.close()
        await until(lambda: is_served(data_dir))

    with_server(data_dir, body)


async def is_served(data_dir: Path) -> bool:
    """Tell whether there is a place for one more connection."""
    try:
        return bool(await ask(data_dir, command="status"))
    except AdminError:
        return False


def test_a_silent_connection_is_closed(data_dir: Path) -> None:
    """Half a request does not hold a place for ever."""

    async def body(_: AdminServer) -> None:
        reader, writer = await asyncio.open_unix_connection(str(data_dir / SOCKET_NAME))
        writer.write(b'{"command"')
        assert await reader.read() == b""
        writer.close()

    with_server(data_dir, body, request_timeout_s=0.02)


def test_a_stop_does_not_wait_for_clients(data_dir: Path) -> None:
    """A client that stays connected is closed, within the bound."""

    async def run() -> None:
        server = new_server(data_dir, Actions())
        await server.start()
        reader, writer = await asyncio.open_unix_connection(str(data_dir / SOCKET_NAME))
        writer.write(b'{"command": "status"}\n')
        assert json.loads(await reader.readline())["ok"] is True
        await server.stop()
        assert await reader.read() == b""
        writer.close()
        assert server.failure is None

    asyncio.run(run())


def test_a_client_that_reads_nothing_is_let_go(data_dir: Path) -> None:
    """It asked, sent its end, and left the answer lying: its socket is given back."""
    actions = Actions()

    async def body(_: AdminServer) -> None:
        with socket.socket(socket.AF_UNIX) as deaf:
            deaf.connect(str(data_dir / SOCKET_NAME))
            # More than the kernel takes, and less than makes the server wait.
            room = deaf.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF)
            actions.reload_added = "a" * (room + 30_000)
            deaf.sendall(b'{"command": "reload"}\n')
            deaf.shutdown(socket.SHUT_WR)
            poll = select.poll()
            poll.register(deaf, 0)
            await until(
                lambda: any(events & select.POLLHUP for _, events in poll.poll(0))
            )

    with_server(data_dir, body, actions, request_timeout_s=0.02)
