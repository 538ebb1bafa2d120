"""A broker as a whole: start, stop, restart, reload, registration, ports."""

import asyncio
import json
import os
import re
import shutil
import socket
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from zlib import crc32

import pytest

from metaq.broker.admin_socket import call_admin
from metaq.broker.app import UPKEEP_THREADS, Broker
from metaq.broker.health import Alarm, find_problems
from metaq.broker.registration import make_snapshot
from metaq.clock import SystemClock
from metaq.config.load import load_config
from metaq.errors import (
    AdminError,
    ConfigError,
    DataMissingError,
    LogDirLockedError,
    MetaqError,
)
from metaq.fs import SystemFileSystem
from metaq.model import BrokerAddress, Millis
from metaq.net.listener import ListenError
from metaq.net.own_host import LOOPBACK
from metaq.storage.holdings import Holdings
from metaq.storage.inventory import write_holdings
from metaq.testing.zk import MemoryZooKeeper
from metaq.zk.definitions import COPY_NAME, TopicDefinition, encode_definition
from metaq.zk.errors import BrokerIdTakenError
from metaq.zk.paths import NodePaths
from tests.rigs.broker import CONFIG, Peer, make_config, running_broker
from tests.rigs.ports import reserved_port
from tests.rigs.waiting import until

NO_HOST = CONFIG.replace("hostName=127.0.0.1\n", "")
HELLO = b"put test 0 5 0 907060870 1\r\nhello"


def run(coroutine) -> None:
    asyncio.run(coroutine)


# -- start, stop, restart --


def test_what_was_acknowledged_is_there_after_a_restart(data_dir: Path) -> None:
    """Records, offsets and ids go on where the last run ended."""

    async def scenario() -> None:
        async with running_broker(data_dir) as broker, Peer(broker) as peer:
            first = await peer.ask(HELLO * 10)
        async with running_broker(data_dir) as broker, Peer(broker) as peer:
            answer = await peer.ask(b"get test g 0 0 1000 1\r\n")
            assert answer.startswith(b"value 250 1\r\n")
            assert answer.count(b"hello") == 10
            second = await peer.ask(HELLO)
            assert second.endswith(b" 0 250")
        last_id = int(first.split(b"\r\n")[-1].split(b" ")[0])
        assert int(second.split(b"\r\n")[1].split(b" ")[0]) > last_id

    run(scenario())


def test_ids_go_on_behind_those_on_the_disk_when_the_clock_went_back(
    data_dir: Path,
) -> None:
    """Row 13: a restart with an older clock repeats no id."""
    from metaq.testing.clock import ManualClock

    async def one_id(wall_ms: int) -> int:
        clock = ManualClock(wall_ms=wall_ms)
        async with (
            running_broker(data_dir, clock=clock) as broker,
            Peer(broker) as peer,
        ):
            return int((await peer.ask(HELLO)).split(b"\r\n")[1].split(b" ")[0])

    async def scenario() -> None:
        ids = [await one_id(ms) for ms in (1_800_000_000_000, 1_700_000_000_000)]
        assert ids[0] < ids[1]

    run(scenario())


def test_a_transaction_at_the_end_of_a_log_hides_no_later_ids(data_dir: Path) -> None:
    """Its messages have the ids that they got when they were put, before others."""
    from metaq.testing.clock import ManualClock

    async def ask_all(clock: ManualClock, *commands: bytes) -> list[int]:
        async with (
            running_broker(data_dir, clock=clock) as broker,
            Peer(broker) as peer,
        ):
            ids = list[int]()
            for each in commands:
                clock.jump_wall_ms(60_000)
                answer = await peer.ask(each)
                assert answer.startswith(b"result 200"), answer
                words = answer.split(b"\r\n")[1].split(b" ")
                ids += [int(words[0])] if each.startswith(b"put") else []
            return ids

    async def scenario() -> None:
        begin, commit = (
            b"transaction TX:a:1 s %b 3\r\n" % word
            for word in (b"BEGIN", b"COMMIT_ONE_PHASE")
        )
        in_it = b"put test 0 5 0 907060870 TX:a:1 2\r\nhello"
        clock = ManualClock(wall_ms=1_800_000_000_000)
        old, new = await ask_all(clock, begin, in_it, HELLO, commit)
        assert old < new
        (later,) = await ask_all(ManualClock(wall_ms=1_700_000_000_000), HELLO)
        assert later > new

    run(scenario())


def test_two_brokers_on_one_data_directory_are_one_too_many(data_dir: Path) -> None:
    """The second start fails in one sentence and leaves the first alone."""

    async def scenario() -> None:
        async with running_broker(data_dir) as first:
            with pytest.raises(LogDirLockedError):
                await Broker(make_config(data_dir)).start()
            async with Peer(first) as peer:
                assert (await peer.ask(HELLO)).startswith(b"result 200")
            assert call_admin_sync_free(data_dir)

    def call_admin_sync_free(path: Path) -> bool:
        return (path / "admin.sock").exists()

    run(scenario())


def test_nothing_that_a_broker_makes_is_for_all_users(data_dir: Path) -> None:
    """Whatever the umask: segments, side files, records and the journal."""

    async def scenario() -> None:
        async with running_broker(data_dir) as broker, Peer(broker) as peer:
            assert (await peer.ask(HELLO)).startswith(b"result 200 ")
            await peer.ask(b"transaction TX:s1:1 s1 BEGIN 1\r\n")
            await peer.ask(b"put test 0 1 0 -1 TX:s1:1 2\r\nx")
            await peer.ask(b"transaction TX:s1:1 s1 COMMIT_ONE_PHASE 3\r\n")

    before = os.umask(0)
    try:
        run(scenario())
    finally:
        os.umask(before)
    modes = {path: path.stat().st_mode & 0o777 for path in data_dir.rglob("*")}
    assert {path.name for path in modes} >= {"test-0", f"{0:020d}.meta", "transactions"}
    for path, mode in modes.items():
        assert mode & ~(0o750 if path.is_dir() else 0o640) == 0, (path, oct(mode))


def test_a_port_in_use_unwinds_the_start(data_dir: Path, tmp_path: Path) -> None:
    """Row 18: a start that fails gives back what it had taken."""

    async def scenario() -> None:
        async with running_broker(data_dir) as first:
            config = make_config(tmp_path / "other", {"serverPort": str(first.port)})
            with pytest.raises(ListenError, match="cannot listen on"):
                await Broker(config).start()
            # The directory is free again.
            async with running_broker(tmp_path / "other"):
                pass

    run(scenario())


def test_start_needs_a_schedule_it_can_read(data_dir: Path) -> None:
    """deleteWhen that APScheduler cannot express is refused at start."""

    async def scenario() -> None:
        config = make_config(data_dir, {"deleteWhen": "0 0 6 15W * ?"})
        with pytest.raises(ConfigError, match=r"(?i)15w"):
            await Broker(config).start()

    run(scenario())


def test_stop_answers_every_put_that_was_taken(data_dir: Path) -> None:
    """Stop under load: each put is answered 200 and on disk, or was never read."""

    async def scenario() -> None:
        async with running_broker(data_dir) as broker:
            peer = await Peer(broker).__aenter__()
            peer.writer.write(HELLO * 20_000)
            await until(lambda: broker.context.counters.cmd_put > 100)
            stopping = asyncio.create_task(broker.stop())
            answers = await peer.reader.read(-1)
            await peer.__aexit__()
            await stopping
        acknowledged = answers.count(b"result 200 ")
        assert acknowledged == answers.count(b"result ") > 100
        stored = (data_dir / "test-0" / f"{0:020}.meta").stat().st_size // 25
        assert stored == acknowledged

    run(scenario())


# -- administration --


async def admin(path: Path, **request: object) -> dict[str, object]:
    return await asyncio.to_thread(call_admin, path, request, timeout_s=30)


def test_administration_goes_through_the_socket(data_dir: Path) -> None:
    """Status, logs, closing and opening partitions; wrong requests get a sentence."""

    async def scenario() -> None:
        overrides = {"scrubBytesPerS": "1024"}
        async with running_broker(data_dir, overrides) as broker, Peer(broker) as peer:
            await peer.ask(HELLO)
            assert os.stat(data_dir / "admin.sock").st_mode & 0o777 == 0o600
            status = await admin(data_dir, command="status")
            assert status["address"] == broker.address
            assert (status["status"], status["problems"]) == ("ok", [])
            logs = await admin(data_dir, command="logs")
            (log,) = logs["logs"]
            assert (log["topic"], log["high_watermark"]) == ("test", 25)
            scrub = await admin(data_dir, command="scrub")
            assert scrub["is_on"] is True
            assert scrub["damage_count"] == 0
            reply = await admin(
                data_dir, command="close_partitions", topic="test", start=0, end=1
            )
            assert reply == {"closed": {"test": [0, 1]}}
            assert (await peer.ask(HELLO)).startswith(b"result 403 ")
            await admin(data_dir, command="open_partitions", topic="test")
            assert (await peer.ask(HELLO)).startswith(b"result 200 ")
            for wrong, text in (
                ({"command": "nonsense"}, "unknown command 'nonsense'"),
                ({"command": "close_partitions", "topic": "x", "start": 0, "end": 0},
                 "topic 'x' is not in the configuration"),
                ({"command": "close_partitions", "topic": "test", "start": 1, "end": 0},
                 "expected 0 <= start <= end"),
                ({"command": "close_partitions", "topic": "test", "start": 0, "end": 9},
                 "0..1"),
                ({"command": "reload"}, "without a configuration file"),
            ):  # fmt: skip
                with pytest.raises(AdminError, match=text):
                    await admin(data_dir, **wrong)
        with pytest.raises(AdminError, match="no broker is running on"):
            await admin(data_dir, command="status")

    run(scenario())


def test_a_long_path_has_an_admin_socket_too(tmp_path: Path) -> None:
    """A data directory whose socket path has no room in sun_path is no exception."""
    data = tmp_path / ("x" * 100) / ("y" * 100)
    data.parent.mkdir()

    async def scenario() -> None:
        async with running_broker(data):
            assert "address" in await admin(data, command="status")
            assert (data / "admin.sock").exists()
        assert not (data / "admin.sock").exists()

    run(scenario())


# -- reload --


def test_reload_takes_over_topics_or_keeps_the_old_settings(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A good file changes topics at once; a bad one changes nothing and says so."""
    caplog.set_level("INFO", "metaq.broker")
    ini, data = tmp_path / "server.ini", tmp_path / "data"
    text = CONFIG.replace("{data}", str(data))

    async def scenario() -> None:
        ini.write_text(text)
        config = load_config(str(ini), lambda path: Path(path).read_bytes())
        broker = Broker(config)
        await broker.start()
        try:
            async with Peer(broker) as peer:
                new = HELLO.replace(b"test 0", b"new 2")
                assert b"do not accept topic new" in await peer.ask(new)
                ini.write_text(text + "[topic=new]\nnumPartitions=3\n")
                reply = await admin(data, command="reload")
                assert reply["added"] == ["new"]
                assert "configuration reloaded: added=new removed=-" in caplog.text
                assert caplog.text.count("reloaded") == 1
                assert (await peer.ask(new)).startswith(b"result 200 ")
                for bad in ("[topic=x]\nnonsense=1\n", "[topic=x]\ndeleteWhen=never\n"):
                    ini.write_text(text + bad)
                    with pytest.raises(AdminError):
                        await admin(data, command="reload")
                    (problem,) = (await admin(data, command="status"))["problems"]
                    assert problem["alarm"] == "reload_refused"
                    assert (await peer.ask(new)).startswith(b"result 200 ")
                ini.write_text(text.replace("brokerId=0", "brokerId=7"))
                reply = await admin(data, command="reload")
                assert "brokerId" in str(reply["needs_restart"])
                assert (await admin(data, command="status"))["problems"] == []
                # Removed topics stay legal until restart (2.2).
                again = new.replace(b"new 2", b"new 0")
                assert (await peer.ask(again)).startswith(b"result 200 ")
        finally:
            await broker.stop()

    run(scenario())


def data_of(server: MemoryZooKeeper, path: str) -> bytes | None:
    node = server.tree().get(path)
    return None if node is None else node.data


# -- registration --

WITH_ZOOKEEPER = {"zk.zkEnable": "true", "zk.zkConnect": "none:1"}


def test_a_broker_is_advertised_while_it_serves_and_withdrawn_when_it_stops(
    data_dir: Path,
) -> None:
    """After listen, before drain; a topic made by a put appears."""

    async def scenario() -> None:
        server = MemoryZooKeeper()
        coordinator = server.coordinator(SystemClock())
        async with running_broker(
            data_dir, WITH_ZOOKEEPER, coordinator=coordinator
        ) as broker:
            node = data_of(server, "/meta/brokers/ids/0/master")
            assert node == broker.address.encode()
            assert data_of(server, "/meta/brokers/topics/test/0-m") == b"2"
            async with Peer(broker) as peer:
                await peer.ask(HELLO.replace(b"test", b"wild-a"))
                answer = await peer.ask(b"stats config 1\r\n")
            # What was set over the file is in what followers compare.
            settings = answer.partition(b"\r\n")[2]
            assert b"zk.zkConnect=none:1" in settings
            checksum = data_of(server, "/meta/brokers/ids/0/master_config_checksum")
            assert checksum == b"%d" % crc32(settings)
            await until(lambda: data_of(server, "/meta/brokers/topics/wild-a/0-m"))
        assert data_of(server, "/meta/brokers/ids/0/master") is None
        assert data_of(server, "/meta/brokers/topics/test/0-m") is None

    run(scenario())


def test_topics_are_remembered_by_a_thread_of_the_start(data_dir: Path) -> None:
    """One that finds no memory to begin would end the broker, or wait for ever."""

    class Noting(SystemFileSystem):
        def write_atomically(self, path: Path, data: bytes) -> None:
            super().write_atomically(path, data)
            if path.name == COPY_NAME:
                writers.append(threading.current_thread())

    async def scenario() -> list[threading.Thread]:
        server = MemoryZooKeeper()
        options = {"coordinator": server.coordinator(SystemClock()), "fs": Noting()}
        async with running_broker(data_dir, WITH_ZOOKEEPER, **options):
            begun, count = threading.enumerate(), len(writers)
            path = NodePaths().topic_definition("made")
            server.put(path, encode_definition(TopicDefinition(partitions=1)))
            await until(lambda: len(writers) > count)
            return begun

    writers = list[threading.Thread]()
    begun = asyncio.run(scenario())
    assert set(writers) <= set(begun)


@pytest.mark.slow
def test_a_node_that_others_deleted_is_an_alarm_until_it_is_back(
    data_dir: Path,
) -> None:
    """The session lives on, clients find nothing, and health names what is gone."""
    path = "/meta/brokers/topics-pub/test/0-m"

    async def scenario() -> None:
        server = MemoryZooKeeper()
        coordinator = server.coordinator(SystemClock())
        async with running_broker(data_dir, WITH_ZOOKEEPER, coordinator=coordinator):

            async def problems() -> list[dict[str, str]]:
                return (await admin(data_dir, command="status"))["problems"]

            assert await problems() == []
            server.remove(path)
            while not (found := await problems()):
                await asyncio.sleep(0)
            assert [problem["alarm"] for problem in found] == ["not_registered"]
            assert path in found[0]["text"]
            await until(lambda: data_of(server, path))

            async def is_well() -> bool:
                return not await problems()

            await until(is_well)

    run(scenario())


def test_a_broker_records_what_it_serves_and_a_reload_changes_the_record(
    data_dir: Path, tmp_path: Path
) -> None:
    """The record outlives the broker; a topic that is gone leaves it."""
    parent = "/meta/catalog/partitions"
    ini = tmp_path / "server.ini"
    text = CONFIG.replace("{data}", str(data_dir)).partition("[zookeeper]")[0]
    zookeeper = "[zookeeper]\nzk.zkConnect=none:1\n"
    ini.write_text(f"{text}{zookeeper}[topic=a]\nnumPartitions=3\n[topic=b]\n")

    async def scenario() -> None:
        server = MemoryZooKeeper()
        config = load_config(str(ini), lambda path: Path(path).read_bytes())
        broker = Broker(config, coordinator=server.coordinator(SystemClock()))
        await broker.start()
        address = broker.address.encode()
        try:
            assert data_of(server, f"{parent}/a/0") == b"3"
            assert data_of(server, f"{parent}/b/0") == b"2"
            ini.write_text(f"{text}{zookeeper}[topic=a]\nnumPartitions=4\n")
            await admin(data_dir, command="reload")
            await until(lambda: data_of(server, f"{parent}/a/0") == b"4")
            await until(lambda: data_of(server, f"{parent}/b/0") is None)
        finally:
            await broker.stop()
        assert data_of(server, "/meta/brokers/ids/0/master") is None
        assert data_of(server, f"{parent}/a/0") == b"4"
        assert data_of(server, "/meta/catalog/brokers/0") == address

    run(scenario())


def test_a_start_without_zookeeper_says_what_it_waits_for(
    data_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Before the wait, not behind it; then the broker serves."""
    caplog.set_level("INFO", "metaq")

    async def scenario() -> None:
        server = MemoryZooKeeper()
        server.stop()
        coordinator = server.coordinator(SystemClock())
        overrides = {**WITH_ZOOKEEPER, "zk.zkConnectionTimeoutMs": "20"}
        async with (
            running_broker(data_dir, overrides, coordinator=coordinator) as broker,
            Peer(broker) as peer,
        ):
            assert (await peer.ask(HELLO)).startswith(b"result 200 ")

    run(scenario())
    wait = "registering in zookeeper: connect=none:1 timeout_ms=20"
    told = caplog.messages[: caplog.messages.index(wait)]
    assert not [line for line in told if line.startswith("registration pending")]
    assert "registration pending" in caplog.text


DIRECTORIES = "/meta/catalog/directories/0"


async def live_once(
    server: MemoryZooKeeper, data: Path, before: bytes | None = None
) -> None:
    """Store one message, and have ZooKeeper know of it, otherwise than before."""

    def is_known() -> bool:
        node = data_of(server, DIRECTORIES)
        return node is not None and node != before and node.endswith(b",1]}")

    coordinator = server.coordinator(SystemClock())
    async with (
        running_broker(data, WITH_ZOOKEEPER, coordinator=coordinator) as broker,
        Peer(broker) as peer,
    ):
        await peer.ask(HELLO)
        await until(is_known)


def test_a_disk_that_is_not_mounted_refuses_the_start(tmp_path: Path) -> None:
    """ZooKeeper knows what the only data directory held; nothing is registered."""
    data = tmp_path / "data"

    async def scenario() -> None:
        server = MemoryZooKeeper()
        await live_once(server, data)
        data.rename(tmp_path / "unmounted")
        for _ in range(2):
            broker = Broker(
                make_config(data, WITH_ZOOKEEPER),
                coordinator=server.coordinator(SystemClock()),
            )
            with pytest.raises(DataMissingError) as refused:
                await broker.start()
            assert f"directory={data} expected identity" in str(refused.value)
            assert f"1 partitions (by ZooKeeper {DIRECTORIES})" in str(refused.value)
            assert data_of(server, "/meta/brokers/ids/0/master") is None
        (data / "holdings").unlink()
        (tmp_path / "unmounted").rename(tmp_path / "mounted")
        shutil.rmtree(data)
        (tmp_path / "mounted").rename(data)
        await live_once(server, data)

    run(scenario())


@pytest.mark.slow
def test_zookeeper_that_comes_later_takes_an_empty_broker_out(tmp_path: Path) -> None:
    """It serves as long as the loss is unknown; then the alarm says what is missing."""
    data = tmp_path / "data"

    async def scenario() -> None:
        server = MemoryZooKeeper()
        await live_once(server, data)
        shutil.rmtree(data)
        server.stop()
        overrides = {**WITH_ZOOKEEPER, "zk.zkConnectionTimeoutMs": "20"}
        coordinator = server.coordinator(SystemClock())
        async with running_broker(data, overrides, coordinator=coordinator) as broker:

            def text() -> str:
                (problem,) = [
                    each
                    for each in find_problems(broker.control.status())
                    if each.alarm is Alarm.NOT_REGISTERED
                ]
                return problem.text

            assert text() == "registration is pending"
            server.start()
            await until(lambda: "is refused" in text())
            assert "expected identity" in text()
            assert data_of(server, "/meta/brokers/ids/0/master") is None

    run(scenario())


def test_an_accepted_loss_is_registered(tmp_path: Path) -> None:
    """And ZooKeeper learns what there is now."""
    data = tmp_path / "data"

    async def scenario() -> None:
        server = MemoryZooKeeper()
        await live_once(server, data)
        before = data_of(server, DIRECTORIES)
        shutil.rmtree(data)
        data.mkdir()
        accepted = Holdings(identity="", written_ms=Millis(0), is_accepted=True)
        write_holdings(SystemFileSystem(), data, accepted)
        await live_once(server, data, before)

    run(scenario())


def test_another_broker_with_our_id_stops_the_start(
    data_dir: Path, unused_port: int
) -> None:
    """Fault 27: one sentence, and the port is closed again."""

    async def scenario() -> None:
        server = MemoryZooKeeper()
        server.put(
            "/meta/brokers/ids/0/master",
            b"meta://elsewhere:8123",
            session_id=server.begin_session(),
        )
        overrides = {**WITH_ZOOKEEPER, "serverPort": str(unused_port)}
        broker = Broker(
            make_config(data_dir, overrides),
            coordinator=server.coordinator(SystemClock()),
        )
        with pytest.raises(BrokerIdTakenError):
            await broker.start()
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", unused_port))

    run(scenario())


def test_the_snapshot_lists_configured_topics_first(tmp_path: Path) -> None:
    """Sorted configured topics, then those that only have a log."""
    config = make_config(tmp_path, {"test:acceptPublish": "false"})
    snapshot = make_snapshot(config, BrokerAddress("h", 1), {"zz", "test", "aa"}, {})
    names = [topic.name for topic in snapshot.topics]
    assert names == ["meta-test", "test", "wild-*", "aa", "zz"]
    assert [topic.accepts_puts for topic in snapshot.topics][:2] == [True, False]
    assert snapshot.config_checksum == crc32(config.data)


def test_a_broker_that_advertises_loopback_unasked_warns(
    data_dir: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """No client elsewhere reaches it; one whose hostName says so knows what it does."""
    monkeypatch.setattr("metaq.broker.registration.own_host", lambda: LOOPBACK)
    text = NO_HOST.replace("zk.zkEnable=false", "zk.zkEnable=true")

    async def scenario() -> None:
        for ini in (text, text.replace("[system]", "[system]\nhostName=127.0.0.1")):
            coordinator = MemoryZooKeeper().coordinator(SystemClock())
            async with running_broker(data_dir, text=ini, coordinator=coordinator):
                status = await admin(data_dir, command="status")
                found.append([p["alarm"] for p in status["problems"]])

    found: list[list[str]] = []
    run(scenario())
    assert found == [["loopback_advertised"], []]
    assert caplog.text.count("hostName is not set") == 1


UNKNOWN = NO_HOST.replace("[system]", "[system]\nhostName=brokre..example").replace(
    "zk.zkEnable=false", "zk.zkConnect=localhost:2181,zoo.example:2181/meta"
)


def test_a_host_name_that_cannot_be_resolved_is_named_at_the_start(
    data_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The broker serves nevertheless: clients may know the name."""
    text = UNKNOWN.replace("zoo.example", "localhost")

    async def scenario() -> None:
        coordinator = MemoryZooKeeper().coordinator(SystemClock())
        async with running_broker(data_dir, text=text, coordinator=coordinator):
            await until(lambda: "[system] hostName names the host" in caplog.text)

    run(scenario())
    assert caplog.text.count("which this machine cannot resolve") == 1


def test_a_local_broker_is_not_reached_from_outside(data_dir: Path) -> None:
    """Its socket is bound to the address that it tells."""

    async def scenario() -> None:
        async with running_broker(data_dir) as broker:
            with socket.socket() as other:
                # Another loopback address stands for another interface.
                assert other.connect_ex(("127.0.0.2", broker.port)) != 0

    run(scenario())


# -- HTTP --


def test_health_and_metrics_are_served_when_a_port_is_set(
    data_dir: Path, unused_port: int
) -> None:
    """The running broker's own figures, over HTTP."""

    def fetch(url: str) -> tuple[int, str]:
        try:
            with urllib.request.urlopen(url, timeout=30) as response:
                return response.status, response.read().decode()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read().decode()

    async def scenario() -> None:
        overrides = {"httpPort": str(unused_port)}
        async with running_broker(data_dir, overrides) as broker, Peer(broker) as peer:
            await peer.ask(HELLO * 3)
            base = f"http://127.0.0.1:{broker.http_port}"
            status, body = await asyncio.to_thread(fetch, f"{base}/health")
            assert status == 200
            assert json.loads(body)["status"] == "ok"
            _, text = await asyncio.to_thread(fetch, f"{base}/metrics")
            assert "\nmetaq_put_latency_seconds_count 3.0\n" in text
            assert re.search(r"\nmetaq_sync_latency_seconds_count [123].0\n", text)
            assert 'partition="0",topic="test"} 75.0' in text
            # The scrub, retention and questions may all wait for a disk that hangs.
            is_over = threading.Event()
            for _ in range(UPKEEP_THREADS):
                broker.context.upkeep.submit(is_over.wait)
            try:
                _, text = await asyncio.to_thread(fetch, f"{base}/metrics")
                assert "metaq_put_latency_seconds_count" in text
            finally:
                is_over.set()

    run(scenario())


@pytest.fixture
def unused_port() -> Iterator[int]:
    with reserved_port() as port:
        yield port


def test_errors_of_the_start_are_metaq_errors() -> None:
    """Whatever a start raises on purpose can be shown as one sentence."""
    assert issubclass(ListenError, MetaqError)
    assert issubclass(BrokerIdTakenError, MetaqError)


def test_settings_without_effect_are_named_at_start(
    data_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A foreign section, a filter that is never run, a setting that a topic keeps."""
    text = f"{CONFIG}\n[gregor]\nx=1\n[topic=filtered]\ngroup.g=com.example.Filter\n"
    text += "deletePolicy=delete,24h\n"

    async def scenario() -> None:
        overrides = {"deletePolicy": "delete,1h"}
        async with running_broker(data_dir, overrides, text=text):
            pass

    run(scenario())
    assert "section ignored: section=[gregor]" in caplog.text
    kept = "but [topic=filtered] says deletePolicy=delete,24h"
    assert f"deletePolicy=delete,1h was set for the broker, {kept}" in caplog.text
    assert "topic=filtered group=g class=com.example.Filter" in caplog.text


def test_a_system_schedule_that_cannot_be_kept_stops_the_start(data_dir: Path) -> None:
    """Even when every topic has a schedule of its own: later topics would have none."""
    overrides = {"deleteWhen": "0 0 6 15W * ?", "test:deleteWhen": "0 0 6 * * ?"}

    async def scenario() -> None:
        async with running_broker(data_dir, overrides):
            pass

    with pytest.raises(ConfigError, match=r"\[system\] deleteWhen: schedule .*15W"):
        run(scenario())
