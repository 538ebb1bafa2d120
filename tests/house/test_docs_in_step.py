"""Links of the pages lead somewhere, dependencies have reasons, formats have a page."""

import re
import tomllib
from pathlib import Path

from tests.house.tree import ROOT

WITH_README = ("record", "protocol", "storage", "txn", "zk", "replication")
NAMING_PATHS = ("ARCHITECTURE.md", "CONTRIBUTING.md")
PATH = re.compile(r"`([\w./-]+\.(?:py|md|ini))`")
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)(?: \"[^\"]*\")?\)")


def pages(root: Path) -> list[Path]:
    top = sorted(root.glob("*.md"))
    rooms = ("docs", "metaq", "bench", "tests")
    return top + [p for room in rooms for p in sorted((root / room).rglob("*.md"))]


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as GitHub makes them."""
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    heads = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w -]", "", head).lower().replace(" ", "-") for head in heads}


def link_faults(root: Path) -> list[str]:
    faults = []
    for page in pages(root):
        text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
        for link in LINK.findall(text):
            target, _, anchor = link.partition("#")
            if "://" in link or link.startswith("mailto:"):
                continue
            found = page.parent / target if target else page
            is_there = found.exists()
            if is_there and anchor and found.suffix == ".md":
                is_there = anchor in anchors(found)
            if not is_there:
                faults.append(f"{page.relative_to(root)} links to {link}")
    return faults


def path_faults(root: Path) -> list[str]:
    rooms = ("metaq", "tests", "docs", "bench", "config")
    files = [p.as_posix() for room in rooms for p in (root / room).rglob("*.*")]
    return [
        f"{page} names {path}"
        for page in NAMING_PATHS
        for path in PATH.findall((root / page).read_text())
        if not any(file.endswith("/" + path) for file in files)
    ]


def dependency_faults(root: Path) -> list[str]:
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    extras = project.get("optional-dependencies", {}).values()
    listed = project.get("dependencies", []) + [d for extra in extras for d in extra]
    names = {re.split(r"[\s<>=!~\[;]", text)[0] for text in listed}
    note = root / "docs" / "decisions" / "0001-dependencies.md"
    rows = set(re.findall(r"^\| `?([\w.-]+)`? \|", note.read_text(), re.MULTILINE))
    heads = {"library", "tool"}
    return [f"{name} has no line in {note.name}" for name in sorted(names - rows)] + [
        f"{note.name} names {name}, which nothing installs"
        for name in sorted(rows - names - heads)
        if set(name) != {"-"}
    ]


def readme_faults(root: Path) -> list[str]:
    faults = []
    for room in (root / "metaq" / name for name in WITH_README):
        names = sorted(p.name for p in room.glob("*.py") if p.name != "__init__.py")
        page = room / "README.md"
        if not page.exists():
            faults += [f"metaq/{room.name}/README.md is missing"] if names else []
            continue
        text = page.read_text()
        faults += [
            f"metaq/{room.name}/README.md lacks {name}"
            for name in names
            if f"`{name}`" not in text
        ]
    return faults


def index_faults(root: Path) -> list[str]:
    """Name each page of docs/ to which its index has no link."""
    index = root / "docs" / "README.md"
    linked = {link.partition("#")[0] for link in LINK.findall(index.read_text())}
    names = [p.relative_to(index.parent) for p in index.parent.rglob("*.md")]
    return [
        f"docs/README.md has no link to {name}"
        for name in sorted(names)
        if {name.as_posix(), name.parts[0]}.isdisjoint(linked)
        and name != Path("README.md")
    ]


def test_the_index_has_every_page() -> None:
    """Decisions are one link."""
    assert index_faults(ROOT) == []


def test_relative_links_lead_somewhere() -> None:
    """Every relative link of a page of ours has its target."""
    assert link_faults(ROOT) == []


def test_paths_named_by_the_maps_are_there() -> None:
    """Files that ARCHITECTURE.md and CONTRIBUTING.md name exist."""
    assert path_faults(ROOT) == []


def test_every_dependency_has_its_reason() -> None:
    """Each dependency has a row in the decision note, and each row a dependency."""
    assert dependency_faults(ROOT) == []


def test_packages_with_a_format_have_a_page() -> None:
    """Packages that own bytes or states explain them and each module in a README."""
    assert readme_faults(ROOT) == []
