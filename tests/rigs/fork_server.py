"""Server that forks Python processes with their modules already imported.

Spark starts two Pythons for each kind of work, and in tests these mostly import: half a
second of processor time for each of hundreds. `executable` returns a program to use as
Spark's Python, or to run a command of this package. It runs `-m MODULE` in a process
forked from a server that has imported both; other command lines it passes to the
interpreter.

    Spark ──starts──> program ──request──> server ──forks──> keeper ──forks──> module
                         │ <── exit code, when it ends ────────┘  ↑ descriptors 0, 1, 2,
                         └──── signals; its own end is SIGKILL ───┘ variables, directory

The modules are those of this checkout, regardless of PYTHONPATH. So tests of the start
or death of a Python, or of code that is sent to executors, use the interpreter; a whole
run always does.
"""

import atexit
import gc
import importlib
import json
import os
import runpy
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Final, NoReturn

from tests.rigs.forked_python import SOCKET
from tests.sampling import IS_WHOLE

ROOT: Final = Path(__file__).parents[2]
PATHS: Final = "PYTHONPATH"
REQUEST_BYTES_MAX: Final = 1 << 20
SIGNALS_MAX: Final = 64
BACKLOG: Final = 100
MODULES: Final = (
    "metaq.cli.main",
    "metaq.pipeline.jobs.session",
    "metaq.client.session",
    "pyspark.worker",
    "pyspark.sql.worker.analyze_udtf",
    "pyspark.sql.worker.commit_data_source_write",
    "pyspark.sql.worker.create_data_source",
    "pyspark.sql.worker.lookup_data_sources",
    "pyspark.sql.worker.plan_data_source_read",
    "pyspark.sql.worker.python_streaming_sink_runner",
    "pyspark.sql.worker.write_into_data_source",
    "metaq.spark.data_source",
    "metaq.pipeline.jobs.day_files",
    "metaq.spark.segments.segment_reader",
    "metaq.spark.sink.exactly_once",
    "metaq.spark.sink.writer",
    "metaq.spark.source.read_task",
    "metaq.spark.source.stream",
)
"""Modules to import if they exist; PySpark before 4.2 lacks some."""


@cache
def executable() -> str:
    """Start the server, which ends with this process; return the program's path."""
    if IS_WHOLE:
        return sys.executable
    directory = Path(tempfile.mkdtemp(prefix="metaq-python-"))
    program = directory / "python"
    source = Path(__file__).with_name("forked_python.py").read_text()
    program.write_text(f"#!{sys.executable} -IS\n{source}")
    program.chmod(0o700)
    # Bound here, so that programs wait for a server that is still importing.
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(str(directory / SOCKET))
        listener.listen(BACKLOG)
        fd = listener.fileno()
        server = subprocess.Popen(
            [sys.executable, "-m", "tests.rigs.fork_server", str(fd), str(directory)],
            cwd=ROOT,
            env={
                **{name: text for name, text in os.environ.items() if name != PATHS},
                # As in all Pythons of Spark, which must agree on the hash of a text.
                "PYTHONHASHSEED": "0",
                # Threads do not survive a fork.
                "OPENBLAS_NUM_THREADS": "1",
                "JE_ARROW_MALLOC_CONF": "background_thread:false",
            },
            # Pipes, because Python's streams remember that these cannot seek.
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            pass_fds=[fd],
            # Ctrl-C must not reach the server.
            start_new_session=True,
        )

    def end() -> None:
        assert server.stdin is not None
        assert server.stdout is not None
        server.stdin.close()
        server.stdout.close()
        server.wait()

    atexit.register(end)
    return str(program)


def serve(listener: socket.socket) -> None:
    """Fork a keeper for each request, until standard input ends."""
    # Keepers are not waited for.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    while sys.stdin not in select.select([sys.stdin, listener], [], [])[0]:
        connection, _ = listener.accept()
        with connection:
            if os.fork() == 0:
                listener.close()
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                keep(connection)


def keep(connection: socket.socket) -> None:
    """Fork the module's process; pass signals to it, and send its exit code."""
    body, fds, _, _ = socket.recv_fds(connection, REQUEST_BYTES_MAX, 3)
    pid = os.fork()
    if pid == 0:
        connection.close()
        become(fds, *json.loads(body))
    for fd in fds:
        os.close(fd)
    end = os.pidfd_open(pid)
    watched = (connection.fileno(), end)
    while end not in select.select(watched, [], [])[0]:
        numbers = connection.recv(SIGNALS_MAX)
        for number in numbers or [signal.SIGKILL]:
            os.kill(pid, number)
        if not numbers:
            break
    _, status = os.waitpid(pid, 0)
    with suppress(OSError):
        connection.send(b"%d" % os.waitstatus_to_exitcode(status))
    os._exit(0)


def become(
    fds: list[int], words: list[str], directory: str, variables: dict[str, str]
) -> NoReturn:
    """Run a module like `python -m`, with descriptors, directory and variables."""
    for number, fd in enumerate(fds):
        os.dup2(fd, number)
        os.close(fd)
    # The server may have inherited ignored signals; the program passes signals on.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    os.chdir(directory)
    os.environ.clear()
    os.environ.update(variables)
    own = os.environ.get(PATHS, "").split(os.pathsep)
    # The first entry is the directory of this module.
    sys.path[:] = [directory, *filter(None, own), *sys.path[1:]]
    importlib.invalidate_caches()
    sys.argv[1:] = words[1:]
    runpy.run_module(words[0], run_name="__main__", alter_sys=True)
    sys.exit()


def main(listener_fd: str, directory: str) -> None:
    with socket.socket(fileno=int(listener_fd)) as listener:
        for module in MODULES:
            with suppress(ModuleNotFoundError):
                importlib.import_module(module)
        gc.collect()
        gc.freeze()
        serve(listener)
    shutil.rmtree(directory)


if __name__ == "__main__":
    main(*sys.argv[1:])
