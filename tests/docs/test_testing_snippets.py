"""The snippets of docs/testing.md run as they stand."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.programs import python_files

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "testing.md").read_text()
FILES = python_files(PAGE)


@pytest.mark.slow
def test_the_snippets_run(tmp_path: Path) -> None:
    """With the conftest of the page, in an empty directory, as a user would."""
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-W", "error", "-p", "no:cacheprovider"],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=300,
        cwd=tmp_path,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{len(FILES) - 1} passed" in done.stdout


def test_every_block_of_python_is_a_file() -> None:
    """A block without a name would not be run."""
    assert PAGE.count("```python") == len(FILES) >= 6
    assert "conftest.py" in FILES
