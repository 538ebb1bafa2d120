"""The snippets of docs/testing.md run as they stand."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "testing.md").read_text()
FILES = dict(re.findall(r"```python\n# (\w+\.py)\n(.*?)```", PAGE, re.DOTALL))


def run_tests(directory: Path, *names: str) -> "subprocess.CompletedProcess[str]":
    """Run files of the page with pytest, as a user would."""
    for name in names:
        (directory / name).write_text(FILES[name])
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-W", "error", "-p", "no:cacheprovider"],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=300,
        cwd=directory,
        check=False,
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in FILES if name != "conftest.py"])
def test_the_snippet_runs(tmp_path: Path, name: str) -> None:
    """Each with the conftest of the page, in an empty directory."""
    done = run_tests(tmp_path, "conftest.py", name)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 passed" in done.stdout


def test_every_block_of_python_is_a_file() -> None:
    """A block without a name would not be run."""
    assert PAGE.count("```python") == len(FILES) >= 6
    assert "conftest.py" in FILES
