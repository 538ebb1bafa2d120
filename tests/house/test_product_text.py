"""The tracked files speak of the product, not of the machine it was written on."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.house.tree import ROOT

# Brackets keep these patterns from matching their own text.
FORBIDDEN = {
    "a path of one machine": re.compile(
        r"/(?<![\w.$}/-]/)(?:[w]ork|[r]oot|[h]ome/[a-z]\w*|[U]sers/\w+)(?=/|\b)(?![\w-])"
    ),
    "a package registry's host": re.compile(
        r"[p]ypi\.org|files\.[p]ythonhosted\.org|[r]epo1?\.maven\.org"
        r"|deb\.[d]ebian\.org|archive\.[u]buntu\.com|[r]egistry\.npmjs\.org"
    ),
    "a merge conflict": re.compile(r"^(<{7}|>{7}) ", re.MULTILINE),
}
# Recorded from the outside world, kept as they were.
FOREIGN = ("tests/golden/",)


def text_faults(name: str, text: str) -> list[str]:
    return [
        f"{name} holds {what}: {found[0]!r}"
        for what, pattern in FORBIDDEN.items()
        if (found := pattern.search(text))
    ]


def tracked(root: Path) -> list[str]:
    """Return what git tracks or would add; skip where this is no checkout."""
    if not (root / ".git").exists():
        pytest.skip("not a git checkout")
    if not shutil.which("git"):
        pytest.skip("no git on this machine")
    # Whose checkout it is does not matter here: git would refuse another user's.
    command = [
        *("git", "-c", "safe.directory=*", "ls-files", "-z"),
        *("--cached", "--others", "--exclude-standard"),
    ]
    listed = subprocess.run(command, cwd=root, check=True, capture_output=True)
    return sorted(set(listed.stdout.decode().split("\0")) - {""})


@pytest.mark.slow
def test_no_file_speaks_of_a_machine_or_a_registry() -> None:
    """No tracked text names a developer's directory or a registry host."""
    faults = []
    for name in tracked(ROOT):
        path = ROOT / name
        if name.startswith(FOREIGN) or not path.is_file():
            continue
        faults += text_faults(name, path.read_bytes().decode("utf-8", "replace"))
    assert faults == []


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("see /w" + "ork/notes.md", "a path of one machine"),
        ("open('/r" + "oot/x')", "a path of one machine"),
        ("HOME=/h" + "ome/alice", "a path of one machine"),
        ("https://py" + "pi.org/simple", "a package registry's host"),
        ("<" * 7 + " main", "a merge conflict"),
    ],
)
def test_planted_texts_are_caught(text: str, what: str) -> None:
    """Each pattern finds what it is there for."""
    assert [what in fault for fault in text_faults("page", text)] == [True]


@pytest.mark.parametrize(
    "text", ["consumers/group/work/x", "$HOME/data", "/homepage", "the /roots of it"]
)
def test_harmless_texts_pass(text: str) -> None:
    """Paths of the product's own world are left alone."""
    assert text_faults("page", text) == []
