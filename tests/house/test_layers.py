"""The import law: who may import whom.

  STOP before you edit the table below. A new arrow is a design decision: it
  decides what can be tested alone and what breaks together. Most wishes for a new
  arrow are wishes for a value type in `model`, or a Protocol beside its consumer.

6   cli ─────────────┐        spark            testing (imported by tests, bench)
                     │          │
5        broker      │       client            siblings: never import each other
           │  └──────┴───┬──────┘
4   storage   txn        net        zk         siblings: never import each other
       │       │          │          │
3   record ────┴── fs   protocol   assignment    config  lifecycle  retry
       │            │     │          │             │        │         │
2      └────────────┴─ errors ──── stats ──────────┴────────┴─────────┘
1                     model        clock
"""

import ast
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "metaq"

L1 = {"model", "clock"}
L2 = L1 | {"errors", "stats"}
PURE = {"model", "errors"}
L4 = {"storage", "txn", "net", "zk"}

ALLOWED: dict[str, set[str]] = {
    "": set(),  # metaq/__init__.py imports nothing
    "__main__": {"cli"},
    "model": set(),
    "clock": {"model"},
    "errors": {"model"},
    "stats": L1,
    "config": L2,
    "retry": L2,
    "lifecycle": L2,
    "fs": L2,
    "record": PURE | {"record"},
    "protocol": PURE | {"protocol"},
    "assignment": PURE,
    "storage": L2 | {"record", "fs", "config", "lifecycle", "retry", "storage"},
    "txn": L2 | {"record", "fs", "config", "lifecycle", "retry", "txn"},
    "net": L2 | {"lifecycle", "protocol", "net"},
    "zk": L2 | {"config", "retry", "lifecycle", "fs", "zk"},
    "broker": L2
    | L4
    | {"record", "protocol", "fs", "config", "lifecycle", "retry", "broker"},
    "client": L2
    | {"record", "protocol", "assignment", "fs", "config", "lifecycle", "retry"}
    | {"net", "zk", "client"},
    "spark": PURE | {"client", "config", "record", "spark"},
    "cli": {"*"},
    "testing": {"*"},
}
FORBIDDEN_TARGETS = {"testing"}  # nobody inside metaq may import it
CLI_MAY_NOT = {"testing"}
TESTING_MAY_NOT = {"cli", "spark"}

PURE_PACKAGES = {"record", "protocol", "assignment"}
PURE_MODULES = {
    "zk.paths", "zk.znodes", "storage.retention", "client.partitioner",
    "spark.plan", "spark.offsets",
}  # fmt: skip
IMPURE_STDLIB = {"asyncio", "socket", "os", "time", "logging", "threading", "random"}

THIRD_PARTY: dict[str, set[str]] = {
    "configobj": {"config"},
    "kazoo": {"zk._kazoo"},
    "apscheduler": {"broker.schedule"},
    "click": {"cli"},
    "rich": {"cli"},
    "prometheus_client": {"broker.metrics"},
    "aiohttp": {"broker.http"},
    "pyspark": {"spark"},
    "pyarrow": {"spark"},
    "hypothesis": {"testing"},
}

# (module, imported): a lazy import inside a function, and why it is one.
LAZY: dict[tuple[str, str], str] = {
    ("broker.app", "broker.http"): "the HTTP port is off by default; aiohttp is 15 MiB",
    ("zk.embedded", "pyspark"): "find_spec only; the wheel carries ZooKeeper's jars",
}


def modules() -> dict[str, Path]:
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        found[name] = path
    return found


MODULES = modules()


def imports_of(name: str) -> list[tuple[str, bool]]:
    """Return (dotted target, is inside a function); own targets start with metaq."""
    tree = ast.parse(MODULES[name].read_text())
    inside = {
        id(node)
        for func in ast.walk(tree)
        if isinstance(func, ast.FunctionDef | ast.AsyncFunctionDef)
        for node in ast.walk(func)
    }
    found = []
    for node in ast.walk(tree):
        lazy = id(node) in inside
        if isinstance(node, ast.Import):
            found += [(alias.name, lazy) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name}: relative imports hide the layer"
            base = node.module or ""
            for alias in node.names:
                full = f"{base}.{alias.name}"
                is_module = full.removeprefix("metaq.") in MODULES
                found.append((full if is_module else base, lazy))
    return found


def own(target: str) -> str | None:
    if target == "metaq":
        return ""
    return target.removeprefix("metaq.") if target.startswith("metaq.") else None


@pytest.mark.parametrize("name", sorted(MODULES))
def test_imports_obey_the_table(name: str) -> None:
    """Every import of our own code is an arrow of the table."""
    package = name.split(".", maxsplit=1)[0]
    allowed = ALLOWED.get(package)
    assert allowed is not None, f"{name}: no row in the table for '{package}'"
    for target, _lazy in imports_of(name):
        mine = own(target)
        if mine is None:
            continue
        assert mine or name in {"cli.version", "cli.main", "protocol.version"}, (
            f"{name} imports the root"
        )
        head = mine.split(".")[0]
        if not mine:
            continue
        if "*" not in allowed:
            assert head in allowed or head == package, f"{name} may not import {mine}"
        if package != "testing":
            assert head not in FORBIDDEN_TARGETS, f"{name} imports testing"
        if package == "testing":
            assert head not in TESTING_MAY_NOT, f"{name} may not import {mine}"


@pytest.mark.parametrize("name", sorted(MODULES))
def test_third_party_imports_stay_in_their_room(name: str) -> None:
    """Each foreign library is seen by the modules named for it and nobody else."""
    for target, lazy in imports_of(name):
        head = target.split(".")[0]
        if head in sys.stdlib_module_names or head == "metaq":
            continue
        rooms = THIRD_PARTY.get(head, set())
        fits = any(name == room or name.startswith(f"{room}.") for room in rooms)
        assert fits or (lazy and (name, head) in LAZY), f"{name} imports {head}"


@pytest.mark.parametrize(
    "name",
    sorted(m for m in MODULES if m.split(".")[0] in PURE_PACKAGES or m in PURE_MODULES),
)
def test_pure_code_has_no_hands(name: str) -> None:
    """Pure modules import neither clock, disk, network, threads nor logging."""
    heads = {target.split(".")[0] for target, _ in imports_of(name)}
    assert not heads & IMPURE_STDLIB, f"{name}: {sorted(heads & IMPURE_STDLIB)}"


@pytest.mark.parametrize("name", sorted(MODULES))
def test_imports_inside_functions_are_listed(name: str) -> None:
    """A lazy import is an exception with a reason, kept in the list above."""
    package = name.split(".", maxsplit=1)[0]
    for target, lazy in imports_of(name):
        if not lazy or package == "cli":
            continue
        mine = own(target)
        head = mine if mine is not None else target.split(".")[0]
        assert (name, head) in LAZY, f"{name} imports {target} inside a function"


def test_there_is_no_import_cycle() -> None:
    """Module-level imports form a graph without cycles."""
    graph = {
        name: {
            mine
            for target, lazy in imports_of(name)
            if not lazy and (mine := own(target)) and mine in MODULES
        }
        for name in MODULES
    }
    done: set[str] = set()

    def visit(name: str, path: tuple[str, ...]) -> None:
        assert name not in path, " -> ".join((*path[path.index(name) :], name))
        if name in done:
            return
        for target in sorted(graph[name]):
            visit(target, (*path, name))
        done.add(name)

    for name in sorted(graph):
        visit(name, ())
