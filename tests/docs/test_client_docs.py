"""What docs/client.md and the README show of the client is true, and runs."""

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import get_type_hints

import pytest

from metaq.client import ClientOptions, ConsumerOptions, ProducerOptions
from metaq.client.options import ClientKeywords, ConsumerKeywords, ProducerKeywords
from metaq.testing.embedded import embedded_broker
from tests.docs.option_tables import PAGE, ROOT, SECTIONS, tables

TEXT = PAGE.read_text()
FILES = dict(re.findall(r"```python\n# (\w+\.py)\n(.*?)```", TEXT, re.DOTALL))


def test_the_option_tables_are_those_of_the_code() -> None:
    """`python -m tests.docs.option_tables` writes them."""
    for name, rows in tables().items():
        section = TEXT.partition(SECTIONS[name])[2].partition("\n###")[0]
        assert rows in section, name


@pytest.mark.parametrize(
    ("options", "keywords"),
    [
        (ClientOptions, ClientKeywords),
        (ProducerOptions, ProducerKeywords),
        (ConsumerOptions, ConsumerKeywords),
    ],
)
def test_keywords_have_the_fields_and_types_of_their_options(
    options: type, keywords: type
) -> None:
    """Two spellings of one thing: what mypy sees, and what is there."""
    assert get_type_hints(keywords) == get_type_hints(options)


def test_every_block_of_python_has_a_name() -> None:
    """One without would not be run."""
    assert TEXT.count("```python") == len(FILES) == 4


README = dict(
    enumerate(
        re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    )
)


@pytest.mark.slow
@pytest.mark.parametrize("text", README.values())
def test_the_snippets_of_the_readme_run(tmp_path: Path, text: str) -> None:
    """Each against a broker of its own."""
    with embedded_broker(topics={"test": 2}) as broker:
        run_script(tmp_path / "snippet.py", text, broker.address)


@pytest.mark.slow
def test_the_snippets_run_one_after_the_other(tmp_path: Path) -> None:
    """As they stand, but for where ZooKeeper is: here one in memory stands in."""
    with embedded_broker(topics={"test": 2}) as broker:
        for name, text in FILES.items():
            run_script(tmp_path / name, text, broker.address)


def run_script(script: Path, text: str, address: str) -> None:
    """Run a snippet in a process of its own; it has to print something."""
    assert text.count('"127.0.0.1:2181"') == 1, script.name
    script.write_text(text.replace('"127.0.0.1:2181"', f'brokers=["{address}"]'))
    done = subprocess.run(
        [sys.executable, "-W", "error", str(script)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout, script.name
