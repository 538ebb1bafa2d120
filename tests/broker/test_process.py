"""A broker as a process: signals, and how it ends."""

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from metaq.broker.app import Broker
from metaq.broker.process import run_broker
from metaq.config.load import load_config
from tests.rigs.broker import CONFIG
from tests.rigs.waiting import until

HELLO = b"put test 0 5 0 907060870 1\r\nhello"


def test_signals_during_the_start_are_obeyed_behind_it(
    data_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """SIGHUP while a broker recovers reloads later, and does not kill; its end is
    logged.
    """
    caplog.set_level("INFO")
    ini = data_dir.with_suffix(".ini")
    ini.write_text(CONFIG.replace("{data}", str(data_dir)))
    config = load_config(str(ini), lambda path: Path(path).read_bytes())
    reloads: list[int] = []

    async def wait_for_reload(broker: Broker) -> None:
        await until(lambda: broker.control.status().reload_count)
        reloads.append(broker.control.status().reload_count)
        os.kill(os.getpid(), signal.SIGTERM)

    async def scenario() -> None:
        async with asyncio.TaskGroup() as group:

            def on_ready(broker: Broker) -> None:
                # See test_listener: lack of descriptors at HTTP and administration.
                assert asyncio.get_running_loop().get_exception_handler() is not None
                reloads.append(broker.control.status().reload_count)
                group.create_task(wait_for_reload(broker))

            # In the turn in which the start begins.
            loop = asyncio.get_running_loop()
            loop.call_soon(os.kill, os.getpid(), signal.SIGHUP)
            await run_broker(config, on_ready=on_ready)

    interval_s = sys.getswitchinterval()
    try:
        asyncio.run(scenario())
    finally:
        sys.setswitchinterval(interval_s)
    assert reloads == [0, 1]
    assert "broker stopped: broker=0" in caplog.text


@pytest.mark.slow
def test_a_broker_takes_the_descriptors_that_it_may_have(tmp_path: Path) -> None:
    """A shell's soft limit does not bound its partitions."""
    ini = tmp_path / "server.ini"
    ini.write_text(CONFIG.replace("{data}", str(tmp_path / "data")))
    program = (
        "import asyncio, os, resource, signal, sys; from pathlib import Path\n"
        "from metaq.broker.process import run_broker\n"
        "from metaq.config.load import load_config\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (100, 300))\n"
        "config = load_config(sys.argv[1], lambda p: Path(p).read_bytes())\n"
        "def show(broker):\n"
        "    print(*resource.getrlimit(resource.RLIMIT_NOFILE))\n"
        "    os.kill(os.getpid(), signal.SIGTERM)\n"
        "asyncio.run(run_broker(config, on_ready=show))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(ini)],
        capture_output=True,
        timeout=30,
        check=True,
    )
    assert done.stdout == b"300 300\n"


@pytest.mark.crash
@pytest.mark.slow
def test_sigterm_under_load_ends_with_0_and_loses_nothing(tmp_path: Path) -> None:
    """Fault 51: a process under load stops within its bound, exit code 0."""
    ini = tmp_path / "server.ini"
    ini.write_text(CONFIG.replace("{data}", str(tmp_path / "data")))
    program = (
        "import asyncio, sys; from pathlib import Path\n"
        "from metaq.broker.process import run_broker\n"
        "from metaq.config.load import load_config\n"
        "config = load_config(sys.argv[1], lambda p: Path(p).read_bytes())\n"
        "show = lambda broker: print(broker.port, flush=True)\n"
        "asyncio.run(run_broker(config, on_ready=show))\n"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", program, str(ini)], stdout=subprocess.PIPE
    )
    assert child.stdout is not None

    async def load(port: int) -> int:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        count, is_signalled = 0, False
        writer.write(HELLO * 50_000)
        while data := await reader.read(65_536):
            count += data.count(b"\n")
            if count > 1_000 and not is_signalled:
                is_signalled = True
                child.send_signal(signal.SIGHUP)
                child.send_signal(signal.SIGTERM)
        writer.close()
        return count

    try:
        acknowledged = asyncio.run(load(int(child.stdout.readline())))
        assert child.wait(30) == 0
    finally:
        child.kill()
        child.wait()
        child.stdout.close()
    stored = (tmp_path / "data" / "test-0" / f"{0:020}.meta").stat().st_size // 25
    assert stored == acknowledged > 1_000
