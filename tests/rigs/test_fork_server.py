"""Forked Pythons have what a started one has: words, variables, streams, an end."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.rigs.fork_server import executable
from tests.sampling import IS_WHOLE

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(IS_WHOLE, reason="a whole run starts all of its Pythons"),
]

MODULE = """
import json, os, sys
found = {
    "words": sys.argv[1:], "input": sys.stdin.readline(), "directory": os.getcwd(),
    "variable": os.environ["OF_TEST"], "name": __name__, "hash": hash("text"),
}
is_imported = "metaq.cli.main" in sys.modules
print(json.dumps([found, os.getpid(), is_imported]), flush=True)
print("an error", file=sys.stderr)
sys.stdin.readline()
sys.exit(7)
"""


@contextmanager
def started(place: Path, program: str) -> Iterator["subprocess.Popen[str]"]:
    (place / "module_of_test.py").write_text(MODULE)
    with subprocess.Popen(
        [program, "-m", "module_of_test", "one", "two words"],
        cwd=place,
        env={**os.environ, "OF_TEST": "\udcff\n=", "PYTHONHASHSEED": "0"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdin is not None
        process.stdin.write("first\n")
        process.stdin.flush()
        yield process


def first_line(process: "subprocess.Popen[str]") -> str:
    """Return what the module prints, and know that it runs."""
    assert process.stdout is not None
    return process.stdout.readline()


def test_a_module_runs_as_in_an_interpreter(tmp_path: Path) -> None:
    """Found in its directory, with all that it was given; it is another process."""
    told = []
    for program in (executable(), sys.executable):
        with started(tmp_path, program) as process:
            found, pid, is_imported = json.loads(first_line(process))
            rest = process.communicate("second\n", timeout=60)
        is_forked = program == executable()
        assert (is_imported, pid != process.pid) == (is_forked, is_forked)
        told.append((found, rest, process.returncode))
    assert told[0] == told[1]
    assert told[0][0]["variable"] == "\udcff\n="
    assert told[0][1:] == (("", "an error\n"), 7)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_signals_are_passed_on(
    tmp_path: Path, number: signal.Signals, request: pytest.FixtureRequest
) -> None:
    """The end of both is that of the module."""
    as_it_was = signal.signal(number, signal.SIG_DFL)  # `nohup` ignores one of them
    request.addfinalizer(lambda: signal.signal(number, as_it_was))
    with started(tmp_path, executable()) as process:
        first_line(process)
        process.send_signal(number)
        # It waits for a line, whose end would be its own end.
        process.wait(60)
        _, errors = process.communicate()
    assert process.returncode == -number
    assert ("KeyboardInterrupt" in errors) == (number == signal.SIGINT)


def test_a_program_that_is_killed_takes_its_module_along(tmp_path: Path) -> None:
    with started(tmp_path, executable()) as process:
        first_line(process)
        process.kill()
        assert process.stdout is not None
        # The end of what the module writes to is that of the module, which else waits.
        assert process.stdout.read() == ""
    assert process.returncode == -signal.SIGKILL


def test_other_words_are_those_of_the_interpreter() -> None:
    code = "import sys; print('metaq' in sys.modules, sys.argv)"
    words = [executable(), "-c", code, "more"]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    assert done.stdout == "False ['-c', 'more']\n"


def test_nothing_is_left_of_a_run_that_was_killed() -> None:
    """The server ends with the process that it was started by, and tidies up."""
    code = """if True:
        import os, subprocess
        from tests.rigs.fork_server import executable
        subprocess.run([executable(), "-m", "metaq", "--version"], check=True)
        print(executable(), flush=True)
        os.kill(os.getpid(), 9)
    """
    with subprocess.Popen(
        [sys.executable, "-c", code],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        # The end of both is that of the server too: it has the second one.
        output, errors = process.communicate(timeout=60)
    assert (process.returncode, errors) == (-signal.SIGKILL, "")
    assert not Path(output.split()[-1]).parent.exists()
