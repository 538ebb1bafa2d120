"""Every block of code of every page is run by a test, or says why not."""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.docs.blocks import CODE, ROOT, Block, blocks_of, pages

# The test that runs the code of a page, block by block in the order of the page.
RUN_BY = {
    "README.md": "tests/docs/test_blocks.py",
    "docs/client.md": "tests/docs/test_client_docs.py",
    "docs/messaging.md": "tests/docs/test_messaging_docs.py",
    "docs/operations.md": "tests/docs/test_blocks.py",
    "docs/recipes.md": "tests/docs/test_recipes_docs.py",
    "docs/spark.md": "tests/spark/test_spark_docs.py",
    "docs/testing.md": "tests/docs/test_testing_snippets.py",
    "metaq/protocol/README.md": "tests/docs/test_blocks.py",
    "metaq/record/README.md": "tests/docs/test_blocks.py",
}
ALONE = [page for page in RUN_BY if page.startswith("metaq/")]
# Frames of the wire, which tests/protocol/test_commands_documents.py reads.
DRAWN = {"docs/protocol.md", "metaq/record/README.md"}
INDENTED = re.compile(r"\n\n    \S")
"""A block without a fence has no language."""
LOCAL = ".venv/bin/metaq local\n"


def block_faults(block: Block) -> list[str]:
    """Name a block without a language, and code that no test runs without a reason."""
    where = f"{block.page}:{block.line}"
    if block.language not in CODE | {"text"}:
        return [f"{where} has the language {block.language!r}"]
    if block.language in CODE and not block.reason and block.page not in RUN_BY:
        return [f"{where} is run by no test, and does not say why"]
    tests = re.findall(r"tests/[\w/]+\.py", block.reason or "")
    return [f"{where} names {t}" for t in tests if not (ROOT / t).exists()]


def outside_fences(page: Path) -> str:
    return re.sub(
        r"^ *```.*?^ *```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL
    )


def test_every_block_is_run_or_says_why_not() -> None:
    """`<!-- not run: reason -->` is the line before a block that is not."""
    blocks = [block for page in pages() for block in blocks_of(page)]
    assert [fault for block in blocks for fault in block_faults(block)] == []
    texts = [page.read_text() for page in pages()]
    fences = [re.findall(r"^ *```", text, re.MULTILINE) for text in texts]
    assert 2 * len(blocks) == sum(map(len, fences))
    indented = {
        page.relative_to(ROOT).as_posix()
        for page in pages()
        if INDENTED.search(outside_fences(page))
    }
    assert indented == DRAWN
    for page, test in RUN_BY.items():
        assert (ROOT / page).name in (ROOT / test).read_text(), page


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("```\nx\n```\n", "has the language ''"),
        ("```python\nx\n```\n", "is run by no test, and does not say why"),
        ("<!-- not run: tests/no.py -->\n```sh\nx\n```\n", "names tests/no.py"),
    ],
)
def test_a_planted_block_is_caught(tmp_path: Path, text: str, fault: str) -> None:
    """With its line."""
    (tmp_path / "a.md").write_text("# A\n\n" + text)
    (block,) = blocks_of(tmp_path / "a.md", tmp_path)
    assert block_faults(block) == [f"a.md:{block.line} {fault}"]
    assert block.line == 3 + bool(block.reason)


def test_a_block_with_a_reason_passes(tmp_path: Path) -> None:
    """As does a drawing."""
    page = tmp_path / "a.md"
    page.write_text("<!-- not run: why -->\n```sh\nx\n```\n\n```text\n|\n```\n")
    assert [block_faults(block) for block in blocks_of(page, tmp_path)] == [[], []]


@pytest.mark.parametrize("page", ALONE)
def test_examples_of_rooms_run(page: str) -> None:
    """They need nothing but the package."""
    for block in blocks_of(ROOT / page):
        if block.language in CODE and block.reason is None:
            exec(compile(block.text, f"{page}:{block.line}", "exec"), {})


class Machine:
    """An empty directory with `metaq local`, for the commands of a page."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.data = directory / "data"
        words = ["local", "--port", "0", "--zk-port", "0", "--data-dir", str(self.data)]
        with (directory / "log").open("wb") as log:
            self._local = subprocess.Popen(
                [sys.executable, "-m", "metaq", *words],
                cwd=ROOT,
                stdout=subprocess.PIPE,
                stderr=log,
            )
        assert self._local.stdout is not None
        line = self._local.stdout.readline().decode()
        assert line.startswith("ready "), (directory / "log").read_text()
        self.zookeeper = dict(w.partition("=")[::2] for w in line.split()[1:])[
            "zookeeper"
        ]

    def stop(self) -> None:
        self._local.send_signal(signal.SIGTERM)
        self._local.wait(30)
        assert self._local.stdout is not None
        self._local.stdout.close()

    def run(self, block: Block) -> None:
        """Run a block as it is, but for the addresses, and expect success."""
        text = block.text.replace("127.0.0.1:2181", self.zookeeper)
        metaq = f"{sys.executable} -m metaq "
        text = re.sub(r"^(?:\.venv/bin/)?metaq ", metaq, text, flags=re.MULTILINE)
        text = text.replace("/var/lib/metaq", str(self.data))
        command = (
            [sys.executable, "-c"] if block.language == "python" else ["sh", "-ec"]
        )
        done = subprocess.run(
            [*command, text],
            cwd=self.directory,
            env={
                **os.environ,
                "PYTHONPATH": str(ROOT),
                "METAQ_ZOOKEEPER": self.zookeeper,
            },
            capture_output=True,
            text=True,
            timeout=600,
            check=False,
        )
        assert done.returncode == 0, f"{block.page}:{block.line}\n{done.stderr}"
        assert done.stdout, f"{block.page}:{block.line}"


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Machine]:
    """Give an empty directory and the broker that the pages begin with."""
    machine = Machine(tmp_path)
    yield machine
    machine.stop()


def run_page(machine: Machine, page: str) -> None:
    for block in blocks_of(ROOT / page):
        if block.language in CODE and not block.reason and block.text != LOCAL:
            machine.run(block)


@pytest.mark.slow
@pytest.mark.spark
@pytest.mark.zookeeper
@pytest.mark.timeout(900)
def test_the_readme_runs_from_top_to_bottom(machine: Machine) -> None:
    """In a directory that holds the README alone, as its commands send that."""
    text = (ROOT / "README.md").read_text()
    (machine.directory / "README.md").write_text(text)
    assert text.count(f"```sh\n{LOCAL}```") == 1
    run_page(machine, "README.md")


@pytest.mark.slow
@pytest.mark.zookeeper
def test_the_commands_of_operations_run(machine: Machine) -> None:
    """From top to bottom; `/var/lib/metaq` is the data directory."""
    run_page(machine, "docs/operations.md")
