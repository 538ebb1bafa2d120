"""The argument tree: names, help, exit codes."""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import click
import pytest

from metaq import __version__
from metaq.cli.main import main
from tests.brokers import StartBroker
from tests.cases import for_each
from tests.cli.runner import run

INTERRUPTED_WHILE_LOADING = """
import os, runpy, signal, sys

class Interrupt:
    def find_spec(self, name, path=None, target=None):
        if name == "metaq.cli.main":
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Interrupt())
runpy.run_module("metaq", run_name="__main__")
"""

# Command → options; other tools are built on these names.
COMMANDS = {
    "broker": {"--config", "--set"},
    "local": {"--data-dir", "--port", "--zk-port", "--set", "--topic", "--replicas"},
    "produce": {"--zookeeper", "--file", "--partition", "--attribute", "--delay"},
    "cat": {"--zookeeper", "--from", "--max", "--follow", "--json", "--partition"},
    "consume": {"--zookeeper", "--group", "--from", "--max", "--no-commit", "--json"},
    "find": {
        "--zookeeper",
        "--key",
        "--header",
        "--id",
        "--since",
        "--until",
        "--limit",
        "--read-max",
        "--partition",
        "--json",
    },
    "scheduled list": {"--zookeeper", "--topic", "--from", "--to", "--max", "--json"},
    "scheduled cancel": {"--zookeeper", "--from", "--to", "--dry-run", "--yes"},
    "request": {"--zookeeper", "--timeout", "--key", "--header", "--json"},
    "ship": {"--zookeeper", "--state", "--from-start", "--once", "--json"},
    "groups": {"--zookeeper", "--json"},
    "groups delete": {"--zookeeper", "--dry-run", "--yes", "--json"},
    "exchanges list": {"--zookeeper", "--json"},
    "exchanges create": {"--zookeeper", "--kind", "--alternate"},
    "exchanges bind": {"--zookeeper", "--key", "--header", "--any", "--json"},
    "exchanges unbind": {"--zookeeper", "--key", "--header", "--any", "--json"},
    "exchanges route": {"--zookeeper", "--header", "--json"},
    "exchanges delete": {"--zookeeper", "--dry-run", "--yes", "--json"},
    "queues list": {"--zookeeper", "--json"},
    "queues show": {"--zookeeper", "--json"},
    "queues create": {"--zookeeper", "--topic", "--where", "--then"},
    "queues alter": {"--zookeeper", "--lease", "--retry-delay", "--json"},
    "queues redrive": {
        "--zookeeper",
        "--key",
        "--cause",
        "--since",
        "--until",
        "--limit",
        "--dry-run",
        "--yes",
        "--json",
    },
    "queues delete": {"--zookeeper", "--dry-run", "--yes", "--json"},
    "queues skip": {"--data-dir", "--config", "--dry-run", "--yes"},
    "offsets show": {"--zookeeper", "--json"},
    "offsets reset": {
        "--zookeeper",
        "--to",
        "--partition",
        "--dry-run",
        "--force",
        "--yes",
    },
    "offsets delete": {"--zookeeper", "--dry-run", "--yes", "--json"},
    "offsets copy": {"--zookeeper", "--dry-run", "--force", "--json"},
    "bench produce": {"--zookeeper", "--topic", "--size", "--count", "--json"},
    "bench consume": {"--zookeeper", "--topic", "--count", "--json"},
    "bench latency": {"--zookeeper", "--topic", "--size", "--count", "--rate"},
    "pipeline ingest": set(),
    "pipeline stats": set(),
    "pipeline archive": set(),
    "pipeline replay": set(),
    "pipeline audit": set(),
    "pipeline verify": set(),
    "pipeline schema": {"--zookeeper", "--count", "--from", "--json"},
    "pipeline init": {"--zookeeper", "--topic", "--alerts"},
    "pipeline run": {"--once", "--every", "--full-refresh", "--metrics-port", "--json"},
    "pipeline status": {"--json"},
    "stats": {"--zookeeper", "--json"},
    "topics": {"--zookeeper", "--json"},
    "brokers": {"--zookeeper", "--json"},
    "brokers status": {"--data-dir", "--config", "--json"},
    "brokers logs": {"--data-dir", "--config", "--json"},
    "brokers directories": {"--data-dir", "--config", "--json"},
    "brokers scrub": {"--data-dir", "--config", "--json"},
    "brokers forget": {"--zookeeper", "--dry-run", "--yes"},
    "topics create": {"--zookeeper", "--partitions", "--brokers", "--set", "--json"},
    "topics alter": {"--zookeeper", "--partitions", "--brokers", "--set", "--json"},
    "topics delete": {"--zookeeper", "--confirm", "--json"},
    "topics describe": {"--zookeeper", "--json"},
    "verify": {"--json"},
    "accept-loss": {"--config", "--yes"},
    "hand-over": {"--back", "--json", "--yes"},
    "replicas": {"--id", "--zookeeper", "--json"},
    "replicas init": {"--config", "--set", "--replica", "--min", "--yes"},
    "replicas join": {"--config", "--set", "--discard", "--yes"},
    "replicas add": {"--id", "--min", "--zookeeper"},
    "replicas remove": {"--id", "--min", "--zookeeper"},
    "replicas transfer": {"--to", "--id", "--zookeeper"},
    "replicas elect": {"--force", "--id", "--yes", "--zookeeper"},
    "replicas restore": {"--missing", "--id", "--dry-run", "--yes"},
    "dump": {"--json"},
    "reload": {"--data-dir", "--config", "--json"},
    "partitions close": {"--data-dir", "--config"},
    "partitions open": {"--data-dir", "--config"},
    "txn list": {"--data-dir", "--config", "--json"},
    "txn commit": {"--data-dir", "--config"},
    "txn rollback": {"--data-dir", "--config"},
    "txn complete": {"--data-dir", "--config"},
    "txn forget": {"--data-dir", "--config"},
    "txn settle": {"--zookeeper"},
}


def commands(
    group: click.Group = main, prefix: str = ""
) -> Iterator[tuple[str, click.Command]]:
    context = click.Context(group)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        assert command is not None
        if isinstance(command, click.Group):
            yield from commands(command, f"{prefix}{name} ")
        if not isinstance(command, click.Group) or command.invoke_without_command:
            yield prefix + name, command


def test_the_commands_are_the_documented_ones() -> None:
    """No name is missing and none was invented."""
    assert {name for name, _command in commands()} == COMMANDS.keys()


@for_each("name", COMMANDS)
def test_every_command_has_its_options(name: str) -> None:
    """The options that others rely on are there under their names."""
    command = dict(commands())[name]
    options = {o for p in command.params for o in p.opts if isinstance(p, click.Option)}
    assert options >= COMMANDS[name]


@for_each("name", COMMANDS)
def test_every_command_explains_itself_with_an_example(name: str) -> None:
    """--help says what it does and shows a line that can be typed."""
    result = run(*name.split(), "--help")
    assert result.exit_code == 0
    head, examples = result.output.split("Examples:")
    assert f"metaq {name}" in examples
    assert len(head.splitlines()) > 4


@for_each("group", ["", *sorted({n.rpartition(" ")[0] for n in COMMANDS} - {""})])
def test_lists_of_commands_say_whole_sentences(
    group: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a terminal of 80 columns nothing of them is cut off."""
    monkeypatch.setenv("COLUMNS", "80")
    shown = run(*group.split(), "--help").output
    listed = shown.partition("Commands:" if group else "Data:")[2]
    assert listed
    assert "..." not in listed
    assert max(map(len, listed.splitlines())) <= 80


ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
SOURCES = (ROOT / "metaq").rglob("*.py")
NAMED = re.compile(r"[`']metaq ([a-z][^`']*)[`']")
APPLICATIONS = {"archive", "latest"}
"""Of Delta tables: their names begin with that of the package, too."""


def named_commands() -> Iterator[tuple[str, list[str]]]:
    """Yield the commands in pages and sentences of the product: file, words."""
    for path in (*PAGES, *SOURCES):
        text = re.sub(r'"\s*\n\s*f?"', "", path.read_text())
        for found in NAMED.findall(text):
            first, *others = [word.split("|") for word in found.split()]
            for each in others[0] if others else [""]:
                yield path.name, [*first, each, *(w[0] for w in others[1:])]


def test_every_command_that_is_named_exists() -> None:
    """With its options: a page said `metaq replicas status`, which there never was."""
    known = dict(commands())
    groups = {name.rpartition(" ")[0] for name in known} - {""}
    groups |= {name.partition(" ")[0] for name in groups}
    wrong, count = [], 0
    for page, (first, *words) in named_commands():
        name = first
        while words and f"{name} {words[0]}" in {*known, *groups}:
            name = f"{name} {words.pop(0)}"
        options = {o for p in getattr(known.get(name), "params", ()) for o in p.opts}
        options |= {"--help"}
        is_known = name in {*known, *groups, *APPLICATIONS}
        is_sub = name in groups and words and re.match("[a-z]", words[0])
        lacking = {w for w in words if w.startswith("--")} - options
        if not is_known or is_sub or lacking:
            wrong.append((page, first, *words))
        count += 1
    assert wrong == []
    assert count > 200


@for_each("name", COMMANDS)
def test_every_example_can_be_parsed(name: str) -> None:
    """Examples use only words and options that exist."""
    command = dict(commands())[name]
    assert command.epilog is not None
    for line in command.epilog.splitlines()[2:]:
        words = line.split("|")[-1].split()
        assert words[:2] == ["metaq", name.split(maxsplit=1)[0]]
        arguments = words[1 + len(name.split()) :]
        known = {o for p in command.params for o in p.opts}
        assert {w for w in arguments if w.startswith("--")} <= known


@pytest.mark.parametrize(
    "words",
    [
        ["nonsense"],
        ["cat"],
        ["cat", "t", "--max", "-1"],
        ["cat", "t", "--nonsense"],
        ["cat", "t", "--broker", "nowhere"],
        ["broker"],
        ["local", "--port", "70000"],
        ["local", "--set", "nonsense"],
        ["local", "--topic", "t=many"],
        ["dump", "/nonexistent"],
        ["verify", "/nonexistent"],
        ["verify", __file__],
        ["topics", "--timeout", "nan"],
        ["consume", "t", "--group", "g", "--idle", "nan"],
        ["pipeline", "stats", "t", "--every", "nan"],
        ["partitions", "close", "t", "5-1"],
        ["topics", "create", "t"],
        ["topics", "create", "t", "--partitions", "0"],
        ["topics", "create", "t", "--partitions", "1", "--brokers", "some"],
        ["topics", "alter", "t", "--set", "nonsense"],
        ["topics", "delete", "t"],
        ["topics", "delete", "t", "--confirm", "u"],
        ["produce", "t", "--file", "/nonexistent"],
    ],
)
def test_wrong_usage_is_exit_code_2_and_a_hint(words: list[str]) -> None:
    """The fault is named, and nothing is started."""
    result = run(*words)
    assert result.exit_code == 2
    assert result.stderr.startswith("Usage: ")
    assert result.stdout == ""


@pytest.mark.parametrize(
    "words",
    [
        ["{}"],
        ["cat", "t", "--{}"],
        ["cat", "t", "--broker", "{}"],
        ["cat", "t", "--from", "{}"],
        ["cat", "t", "{}"],
        ["local", "--set", "{}"],
        ["topics", "create", "t", "--partitions", "{}"],
        ["topics", "delete", "{}"],
        ["produce", "t", "--file", "/nonexistent/{}"],
        ["broker", "--config", "/nonexistent/{}"],
    ],
    ids=" ".join,
)
def test_what_the_user_typed_gives_the_terminal_no_commands(words: list[str]) -> None:
    """It is shown as Python writes it, on the line that it is said on."""
    named = [word.format("a\x1b[2Jb\nfaked") for word in words]
    result = run(*named)
    assert result.exit_code in {1, 2}
    assert "\x1b" not in result.output
    assert not any(line.startswith("faked") for line in result.output.splitlines())


def test_the_version_is_told() -> None:
    """--version prints the package's version."""
    assert run("--version").output == f"metaq, version {__version__}\n"


@pytest.mark.slow
def test_an_interrupt_while_the_commands_are_loaded_leaves_no_traceback() -> None:
    """Ctrl-C right after the start ends the process as it ends any other."""
    child = subprocess.run(
        [sys.executable, "-c", INTERRUPTED_WHILE_LOADING],
        capture_output=True,
        timeout=120,
        check=False,
    )
    assert child.returncode == -signal.SIGINT
    assert child.stderr == b""


@pytest.mark.slow
def test_what_is_logged_is_a_sentence_too() -> None:
    """Errors, and warnings of the command; what the client warns of is for `-v`."""
    program = """
import logging, metaq.cli.main as cli, metaq.cli.topics
def topics(**_options):
    logging.getLogger("metaq.client").info("connected")
    logging.getLogger("metaq.client").warning("broker lost: broker=%s", 7)
    logging.getLogger("metaq.client").error("damaged: partition=%s", "0-1")
    logging.getLogger("metaq.cli.follow").warning("file was cut: path=%s", "x")
cli.main.commands["topics"].callback = topics
cli.main(["topics"])
"""
    child = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, timeout=120, check=True
    )
    assert child.stderr.decode().splitlines() == [
        "metaq: damaged: partition=0-1",
        "metaq: file was cut: path=x",
    ]


@pytest.mark.slow
@pytest.mark.parametrize("words", ["topics >&-", "topics nothing 2>&-"])
def test_closed_outputs_take_everything(start_broker: StartBroker, words: str) -> None:
    """As /dev/null would; the exit code is what it always is."""
    line = f"-m metaq {words} --broker {start_broker().address}"
    child = subprocess.run(
        ["sh", "-c", f"exec {sys.executable} {line}"],
        capture_output=True,
        timeout=120,
        check=False,
    )
    assert child.stderr == child.stdout == b""
    assert child.returncode == (1 if "nothing" in words else 0)


def run_into(out: IO[bytes] | int, words: str, *, err: IO[bytes] | None = None) -> Any:
    return subprocess.run(
        [sys.executable, "-m", "metaq", *words.split()],
        env={**os.environ, "PYTHONUNBUFFERED": ""},
        stdout=out,
        stderr=err or subprocess.PIPE,
        timeout=120,
        check=False,
    )


@pytest.mark.slow
@pytest.mark.parametrize("words", ["--help", "--version", "topics --help"])
def test_an_output_that_takes_nothing_is_one_sentence(words: str) -> None:
    """No traceback, and our exit codes, also for what was not written at once."""
    with Path("/dev/full").open("wb") as full:
        child = run_into(full, words)
        assert child.returncode == 1
        assert child.stderr == b"metaq: standard output: No space left on device\n"
        assert run_into(full, words, err=full).returncode == 1
    read, written = os.pipe()
    os.close(read)
    with os.fdopen(written, "wb") as gone:
        child = run_into(gone, words)
    assert (child.returncode, child.stderr) == (141, b"")


@pytest.mark.slow
def test_an_output_that_takes_no_answer_of_a_broker_is_one_sentence(
    start_broker: StartBroker,
) -> None:
    test_an_output_that_takes_nothing_is_one_sentence(
        f"topics --broker {start_broker().address}"
    )


@pytest.mark.slow
def test_a_full_standard_error_changes_no_exit_code(start_broker: StartBroker) -> None:
    """The error cannot be printed; the code says that there was one."""
    words = f"topics nothing --broker {start_broker().address}"
    with Path("/dev/full").open("wb") as full:
        child = run_into(subprocess.PIPE, words, err=full)
    assert (child.returncode, child.stdout) == (1, b"")


@pytest.mark.slow
def test_a_closed_standard_input_is_an_empty_one(start_broker: StartBroker) -> None:
    """`metaq produce test <&-` finds no lines, and says so."""
    words = f"-m metaq produce test --broker {start_broker().address} <&-"
    child = subprocess.run(
        ["sh", "-c", f"exec {sys.executable} {words}"],
        capture_output=True,
        timeout=120,
        check=False,
    )
    assert child.stderr == b""
    assert child.stdout.startswith(b"0 messages, 0 B in ")
    assert child.returncode == 0
