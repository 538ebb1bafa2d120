"""The demo tells the truth."""

import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PROGRAM = ROOT / "examples" / "demo.py"
DEMO = runpy.run_path(str(PROGRAM))
A, B, C = ("0-1", 0), ("0-1", 23), ("0-2", 0)


def demo(*words: str) -> "subprocess.CompletedProcess[str]":
    # A program finds the package installed; this checkout is the one that is tested.
    return subprocess.run(
        [sys.executable, str(PROGRAM), *words],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=800,
        cwd=ROOT,
        check=False,
    )


def test_a_file_is_read_in_whole_lines(tmp_path: Path) -> None:
    """Any chunk size gives the lines; the last one needs no line end."""
    path = tmp_path / "log"
    path.write_bytes(b"one\n\ntwo\r\nlast")
    for size in range(1, 20):
        source = DEMO["Source"](path)
        lines: list[bytes] = []
        for _ in range(40):
            lines += source.read(size)
        assert lines == [b"one", b"", b"two\r", b"last"]


def test_a_log_that_is_being_written_gives_finished_lines_only(tmp_path: Path) -> None:
    """The rest of a line is waited for."""
    path = tmp_path / "log"
    path.write_bytes(b"one\nhal")
    source = DEMO["Source"](path, is_live=True)
    assert source.read(100) == [b"one"]
    assert source.read(100) == []
    with path.open("ab") as file:
        file.write(b"f\n")
    assert source.read(100) == [b"half"]


def test_only_readable_text_is_taken(tmp_path: Path) -> None:
    """Empty, binary and compressed files and links are left out."""
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "text.log").write_text("some lines\n")
    (tmp_path / "short").write_text("x\n")
    (tmp_path / "empty").write_text("")
    (tmp_path / "binary").write_bytes(b"\x7fELF\0\0")
    (tmp_path / "old.gz").write_text("not really")
    (tmp_path / "link").symlink_to(tmp_path / "short")
    found = DEMO["find_logs"](tmp_path)
    assert [path.name for path in found] == ["short", "text.log"]


@pytest.mark.parametrize(
    ("got", "missing", "wrong", "doubled"),
    [
        ([(A, 1), (B, 2)], 0, 0, 0),
        ([(B, 2), (A, 1)], 0, 0, 0),
        ([(A, 1)], 1, 0, 0),
        ([(A, 1), (B, 2), (B, 2), (B, 2)], 0, 0, 2),
        ([(A, 1), (B, 3)], 1, 1, 0),
        ([(A, 1), (B, 2), (C, 1)], 0, 1, 0),
    ],
)
def test_every_difference_is_found(
    got: list[tuple[tuple[str, int], int]], missing: int, wrong: int, doubled: int
) -> None:
    """Lost, changed, never sent, and doubled, which is none."""
    verdict = DEMO["compare"]({A: 1, B: 2}, got)
    assert (verdict.missing, verdict.wrong, verdict.doubled) == (
        missing,
        wrong,
        doubled,
    )


def test_notes_end_with_a_whole_line(tmp_path: Path) -> None:
    """A killed process may have written half of one."""
    path = tmp_path / "notes"
    path.write_bytes(b"0-1 0 77\n0-1 23 4294967295\n0-2 ")
    assert DEMO["read_notes"](path) == [(A, 77), (B, 4294967295)]


@pytest.mark.slow
def test_a_file_that_is_not_there_is_one_sentence() -> None:
    """Nothing is started."""
    done = demo("/nonexistent/file")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("demo: ")


@pytest.mark.zookeeper
@pytest.mark.spark
@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.sampled(1)
@pytest.mark.parametrize("takes_own_logs", [False, True])
def test_real_lines_come_back(tmp_path: Path, *, takes_own_logs: bool) -> None:
    """Files that were named, or the machine's own: exit code 0, and nothing is left."""
    path = tmp_path / "some.log"
    path.write_bytes(b"one\ntwo\n\xff\x00binary\r\nlast without end")
    done = demo() if takes_own_logs else demo(str(path))
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert "kill -9" in done.stdout
    assert "lines arrived, byte for byte" in done.stdout
    assert "are archived, none lost, doubled or changed" in done.stdout
    assert "metaq groups" in done.stdout
    if not takes_own_logs:
        assert "  4 lines, " in done.stdout
        assert "  4 of 4 lines arrived" in done.stdout
        assert re.search(r"^  -  +some\.log +4$", done.stdout, re.MULTILINE)
