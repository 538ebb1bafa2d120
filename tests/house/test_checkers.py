"""The laws themselves: each catches the violation planted for it, and only that."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.house import test_docs_in_step as docs
from tests.house import test_layers as layers
from tests.house import test_public_api as public
from tests.house import test_rooms as rooms
from tests.house import test_tidy as tidy
from tests.house.tree import Tree

TAKES_TWO = (
    "class Proxy:\n def f(self, a, b) -> int:\n  '''Add.'''\n  raise KeyError(a)"
)

# (law, file, planted source, what the complaint names)
PLANTED: list[tuple[Callable[[Tree], list[str]], str, str, str]] = [
    (layers.layer_faults, "storage/a.py", "import metaq.net.b", "net.b"),
    (layers.layer_faults, "storage/a.py", "from metaq.net import b", "net.b"),
    (layers.layer_faults, "storage/a.py", "from metaq import net", "net"),
    (layers.layer_faults, "errors.py", "from metaq.config import x", "config"),
    (layers.layer_faults, "zk/a.py", "from metaq import __version__", "root"),
    (layers.layer_faults, "zk/a.py", "import metaq", "root"),
    (layers.layer_faults, "zk/a.py", "from . import b", "relative"),
    (layers.layer_faults, "attic.py", "X = 1", "no row"),
    (layers.layer_faults, "attic/a.py", "X = 1", "no row"),
    (layers.layer_faults, "__init__.py", "import os", "root imports os"),
    (layers.layer_faults, "cli/a.py", "from metaq.testing import zk", "testing"),
    (layers.layer_faults, "cli/a.py", "import metaq.spark.plan", "optional"),
    (layers.layer_faults, "cli/a.py", "import metaq.client.b", "import no client.b"),
    (layers.layer_faults, "cli/a.py", "import metaq.pipeline.jobs", "optional"),
    (layers.layer_faults, "spark/a.py", "import metaq.pipeline.jobs", "pipeline.jobs"),
    (layers.layer_faults, "pipeline/a.py", "import metaq.spark.plan", "spark.plan"),
    (
        layers.layer_faults,
        "pipeline/a.py",
        "def f():\n import metaq.client.spool",
        "no",
    ),
    (layers.layer_faults, "testing/a.py", "import metaq.cli.main", "cli.main"),
    (layers.layer_faults, "net/a.py", "def f():\n import metaq.zk.b", "zk.b"),
    (
        layers.room_faults,
        "client/produce/a.py",
        "import metaq.client.consume.b",
        "'produce' may not import client.consume.b",
    ),
    (layers.room_faults, "client/spool.py", "import metaq.client.session", "session"),
    (layers.room_faults, "client/group/a.py", "import metaq.client.session", "session"),
    (layers.room_faults, "client/a.py", "import metaq.client.sync.b", "client.sync.b"),
    (layers.foreign_faults, "broker/a.py", "import kazoo.client", "kazoo"),
    (layers.foreign_faults, "broker/a.py", "def f():\n import yaml", "yaml"),
    (layers.purity_faults, "record/a.py", "import asyncio.streams", "asyncio"),
    (layers.purity_faults, "protocol/a.py", "from pathlib import Path", "pathlib"),
    (layers.purity_faults, "zk/paths.py", "import time", "time"),
    (layers.purity_faults, "zk/paths.py", "import metaq.zk.session", "session"),
    (layers.network_faults, "storage/a.py", "import socket", "socket"),
    (layers.zookeeper_faults, "client/consume/a.py", "from metaq.zk import b", "zk"),
    (layers.lazy_faults, "broker/a.py", "def f():\n import json", "json"),
    (layers.lazy_faults, "net/a.py", "X = __import__('metaq.zk')", "__import__"),
    (
        layers.lazy_faults,
        "net/a.py",
        "import importlib\nX = importlib.import_module('metaq.zk')",
        "import_module",
    ),
    (layers.lazy_faults, "net/a.py", "from importlib import import_module", "import_m"),
    (layers.cycle_faults, "zk/a.py", "import metaq.zk.a", "zk.a -> zk.a"),
    (layers.cycle_faults, "zk/a.py", "def f():\n import metaq.zk.a", "zk.a -> zk.a"),
    (tidy.file_size_faults, "a.py", "X = 1\n" * 801, "801"),
    (tidy.function_size_faults, "a.py", "def f():\n" + " x\n" * 70, "71"),
    (tidy.door_faults, "zk/a.py", "import time as t", "time"),
    (tidy.door_faults, "zk/a.py", "from random import choice", "random"),
    (tidy.door_faults, "zk/a.py", "open('x')", "open"),
    (tidy.door_faults, "zk/a.py", "import os\nos.fsync(1)", "os.fsync"),
    (tidy.door_faults, "zk/a.py", "from os import replace", "os.replace"),
    (tidy.door_faults, "zk/a.py", "p.read_bytes()", "read_bytes"),
    (tidy.door_faults, "zk/a.py", "pathlib.Path('x').open()", "Path.open"),
    (tidy.door_faults, "zk/a.py", "datetime.now()", "datetime.now"),
    (tidy.door_faults, "zk/a.py", "def f():\n import shutil", "shutil"),
    (tidy.doubled_name_faults, "a.py", "class A: ...\nclass A: ...", "class A is"),
    (tidy.leftover_faults, "a.py", "# TO" + "DO later", "without (issue)"),
    (tidy.leftover_faults, "a.py", "# XX" + "X later", "without (issue)"),
    (tidy.leftover_faults, "a.py", "x = [print('a')]", "print"),
    (tidy.leftover_faults, "a.py", "breakpoint()", "breakpoint"),
    (tidy.log_faults, "a.py", "log.info('rolled file=%s', 1)", "rolled"),
    (tidy.log_faults, "a.py", "_log.log(level, 'cut at=%d: %s', 1, 2)", "cut"),
    (tidy.silencer_faults, "a.py", "x = 1  # type: " + "ignore", "no reason"),
    (tidy.silencer_faults, "a.py", "x = 1  # no" + "qa", "no reason"),
    (tidy.dead_file_faults, "zk/a.py", "X = 1", "zk/a.py"),
    (public.documentation_faults, "a.py", "X = 1", "a.py has no docstring"),
    (public.documentation_faults, "a.py", "'''D.'''\nclass A: ...", "A has no"),
    (
        public.documentation_faults,
        "a.py",
        "'''D.'''\nclass A:\n '''D.'''\n def f(self) -> None: ...",
        "A.f has no",
    ),
    (public.annotation_faults, "a.py", "def f(): ...", "returns"),
    (public.annotation_faults, "a.py", "def f(*, a) -> int: ...", "what a is"),
    (public.annotation_faults, "a.py", "class A:\n def f(self, b) -> int: ...", "b is"),
    (
        rooms.logger_faults,
        "zk/a.py",
        "import logging\nlog = logging.getLogger(__name__)",
        "calls its logger log",
    ),
    (rooms.test_file_faults, "zk/a.py", "def f():\n x = 1\n return x", "zk/**/test_a*"),
    (rooms.section_faults, "testing/proxy.py", TAKES_TWO, "Proxy.f has no Args"),
    (rooms.section_faults, "testing/proxy.py", TAKES_TWO, "Proxy.f has no Returns"),
    (rooms.section_faults, "testing/proxy.py", TAKES_TWO, "Proxy.f has no Raises"),
    (
        rooms.section_faults,
        "client/public.py",
        "from metaq.zk.b import g\n__all__ = ['g']",
        "g has no Args",
    ),
]

INNOCENT = {
    "__init__.py": '"""Root."""\n__version__ = "1"\n',
    "zk/__init__.py": '"""Coordination."""\n',
    "zk/session.py": (
        '"""Sessions."""\n\nfrom metaq.errors import MetaqError\n\n\n'
        'class Session:\n    """A session."""\n\n'
        '    def wait(self, timeout_s: float) -> None:\n        """Wait."""\n'
        "        raise MetaqError(timeout_s)\n"
    ),
    "errors.py": '"""Errors."""\n\n\nclass MetaqError(Exception):\n    """Root."""\n',
    "cli/main.py": '"""Version."""\n\nfrom metaq import __version__\n\nprint(1)\n',
}

LAWS = list(dict.fromkeys(law for law, *_ in PLANTED))


def plant(root: Path, files: dict[str, str]) -> Tree:
    for name, text in files.items():
        path = root / "metaq" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return Tree(root)


@pytest.mark.parametrize(("law", "file", "source", "named"), PLANTED)
def test_a_planted_violation_is_caught(
    tmp_path: Path,
    law: Callable[[Tree], list[str]],
    file: str,
    source: str,
    named: str,
) -> None:
    """The law complains about the planted line, and names it."""
    targets = dict.fromkeys(("net/b.py", "net/__init__.py", "zk/session.py"), "")
    faults = law(
        plant(tmp_path, {"zk/b.py": "def g(a, b): ...", **targets, file: source})
    )
    assert any(named in fault for fault in faults), faults


def test_a_docstring_may_refer_to_another_that_says_it(tmp_path: Path) -> None:
    """It has the sections of that one, and none besides."""
    sections = "Add.\n\nArgs:\n a: one.\n\nRaises:\n KeyError: no.\n"
    says = TAKES_TWO.replace("Add.", sections)
    refers = TAKES_TWO.replace("Proxy", "Faults").replace("Add.", "Add; see `Proxy.f`.")
    files = {"testing/proxy.py": says, "testing/fake_broker.py": refers}
    assert rooms.section_faults(plant(tmp_path, files)) == [
        "metaq/testing/fake_broker.py: Faults.f has no Returns",
        "metaq/testing/proxy.py: Proxy.f has no Returns",
    ]


def test_two_modules_that_need_each_other_are_a_cycle(tmp_path: Path) -> None:
    """The chain is spelled out from one module back to itself."""
    tree = plant(
        tmp_path, {"zk/a.py": "import metaq.zk.b", "zk/b.py": "from metaq.zk import a"}
    )
    assert layers.cycle_faults(tree) == ["zk.a -> zk.b -> zk.a"]


def test_a_row_without_a_module_is_caught(tmp_path: Path) -> None:
    """All rows are named but those of the modules that are there."""
    faults = layers.dead_row_faults(plant(tmp_path, {"model.py": ""}))
    assert "broker.http is in a table, and no module" in faults
    assert not any(fault.startswith("model ") for fault in faults)


@pytest.mark.parametrize("law", LAWS)
def test_innocent_code_passes(tmp_path: Path, law: Callable[[Tree], list[str]]) -> None:
    """A small tree that keeps every law hears no complaint."""
    tree = plant(tmp_path, INNOCENT)
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_all.py").write_text(
        "import metaq.cli.main\nimport metaq.zk.session\n"
    )
    assert law(tree) == []


def test_a_dead_link_is_caught(tmp_path: Path) -> None:
    """Relative links are followed, to headings too; code and the web are not."""
    (tmp_path / "README.md").write_text(
        "# Here, there\n[a](docs/a.md#b) [w](https://example.org/x)"
        " [h](#here-there) [n](#there)\n```\n[c](no.md)\n```\n"
    )
    wanted = ["README.md links to docs/a.md#b", "README.md links to #there"]
    assert docs.link_faults(tmp_path) == wanted


def test_a_page_that_the_index_lacks_is_caught(tmp_path: Path) -> None:
    """A folder that is linked has no lines of its own."""
    for name in ("README.md", "a.md", "b.md", "notes/c.md"):
        path = tmp_path / "docs" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("[a](a.md) [notes](notes)\n")
    assert docs.index_faults(tmp_path) == ["docs/README.md has no link to b.md"]


def test_a_dependency_without_reason_is_caught(tmp_path: Path) -> None:
    """Undocumented dependencies and documented absentees are both named."""
    (tmp_path / "docs" / "decisions").mkdir(parents=True)
    (tmp_path / "pyproject.toml").write_text(
        '[project]\ndependencies = ["left>=1,<2"]\n'
    )
    note = tmp_path / "docs" / "decisions" / "0001-dependencies.md"
    note.write_text("| library | why |\n|---|---|\n| right | because |\n")
    assert docs.dependency_faults(tmp_path) == [
        "left has no line in 0001-dependencies.md",
        "0001-dependencies.md names right, which nothing installs",
    ]


def test_a_package_without_its_page_is_caught(tmp_path: Path) -> None:
    """More than `__init__` in a package of formats asks for a README that names it."""
    plant(tmp_path, {"zk/__init__.py": "", "zk/paths.py": "", "txn/__init__.py": ""})
    assert docs.readme_faults(tmp_path) == ["metaq/zk/README.md is missing"]
    plant(tmp_path, {"zk/README.md": "`plan.py`"})
    assert docs.readme_faults(tmp_path) == ["metaq/zk/README.md lacks paths.py"]


def test_a_path_that_is_not_there_is_caught(tmp_path: Path) -> None:
    """Paths are whole, or the ends of some."""
    plant(tmp_path, {"zk/paths.py": ""})
    for name in docs.NAMING_PATHS:
        (tmp_path / name).write_text("`zk/paths.py`, `metaq/zk/paths.py`, `paths.py`")
    assert docs.path_faults(tmp_path) == []
    (tmp_path / "CONTRIBUTING.md").write_text("`zk/aths.py`, `aths.py`")
    assert docs.path_faults(tmp_path) == [
        "CONTRIBUTING.md names zk/aths.py",
        "CONTRIBUTING.md names aths.py",
    ]
