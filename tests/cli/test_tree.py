"""Groups of commands, what their usage says, and how errors of commands end."""

import re
import subprocess
import sys

import pytest
from click import Context
from click.testing import CliRunner, Result

from metaq.cli import options
from metaq.cli.main import main
from metaq.cli.tree import SECTIONS, ListingGroup, MetaqGroup
from metaq.errors import ConfigError
from tests.cli.runner import run


def test_help_shows_the_commands_in_groups() -> None:
    """Each command once, in an order of use, and not one list of all of them."""
    named = [name for names in SECTIONS.values() for name in names]
    shown = run("--help").output
    assert sorted(named) == sorted(main.commands)
    heads = re.findall(r"^(\w+):$", shown, re.MULTILINE)
    assert heads == ["Options", *SECTIONS]
    assert list(SECTIONS) == ["Data", "Groups", "Topics", "Operate", "Pipelines"]
    assert [name for name in named if f"\n  {name} " not in shown] == []


@pytest.mark.slow
def test_a_command_loads_its_own_modules() -> None:
    """A client's command starts without a broker's parts, and those of replicas."""
    program = """
import sys
from metaq.cli.main import main
try:
    main(["find", "--help"])
except SystemExit:
    loaded = {"metaq.cli.find", "metaq.cli.serve", "metaq.replication.node"}
    print(loaded & sys.modules.keys())
"""
    child = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, timeout=120, check=True
    )
    assert child.stdout.splitlines()[-1] == b"{'metaq.cli.find'}"


def invoke(error: BaseException) -> Result:
    """Run a command that fails, of a group like that of all commands."""
    assert type(main) is MetaqGroup
    group = MetaqGroup()

    @group.command("fail")
    def fail() -> None:
        raise error

    return CliRunner().invoke(group, ["fail"])


def ended(error: BaseException) -> tuple[int, str]:
    result = invoke(error)
    return result.exit_code, result.stderr


def test_an_error_is_one_sentence_and_exit_code_1() -> None:
    """No traceback; an error of several lines becomes one."""
    error = ConfigError("server.ini: wrong\nvery wrong")
    assert ended(error) == (1, "metaq: server.ini: wrong very wrong\n")


def test_a_group_without_a_command_shows_its_help() -> None:
    """Line by line, as --help does."""
    assert run("queues").output == run("queues", "--help").output


def test_an_error_of_the_system_is_one_sentence_too() -> None:
    """The file that it is about is named."""
    error = PermissionError(13, "Permission denied", "some/file")
    assert ended(error) == (1, "metaq: some/file: Permission denied\n")


def test_ctrl_c_is_exit_code_130_without_a_word() -> None:
    """An interrupt is no error to report."""
    assert ended(KeyboardInterrupt()) == (130, "")


def test_a_bug_is_not_hidden() -> None:
    """An error that is not one of ours keeps its traceback."""
    error = AssertionError("a bug")
    assert invoke(error).exception is error


def test_options_of_the_list_are_not_those_of_forgetting() -> None:
    """An address that is said too early must not be left out in silence."""
    words = ["brokers", "--zookeeper", "other:1", "forget", "3", "--yes"]
    result = CliRunner().invoke(main, words)
    assert result.exit_code == 2
    assert "options go after the command" in result.stderr
    assert options.ZOOKEEPER not in result.stderr


@pytest.mark.parametrize("group", ["topics", "groups", "brokers", "replicas"])
def test_the_word_list_lists(group: str) -> None:
    """Groups that list without a command take the word that the others need."""
    found = main.commands[group]
    assert isinstance(found, ListingGroup)
    for rest in ([], ["--json"]):
        context = Context(found, info_name=group)
        plain = found.make_context(group, [*rest], parent=context).params
        assert (
            found.make_context(group, ["list", *rest], parent=context).params == plain
        )


@pytest.mark.parametrize("command", ["create", "alter", "delete", "describe"])
def test_the_usage_of_a_command_of_topics_is_its_own(command: str) -> None:
    """Its line leaves out the topics that the group would list."""
    first = run("topics", command, "--help").stdout.splitlines()[0]
    assert f"topics {command} [OPTIONS] TOPIC" in first
    listing = run("topics", "--help").stdout.splitlines()[0]
    assert "topics [OPTIONS] [TOPIC]... | COMMAND" in listing
