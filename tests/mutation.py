"""Change one line of the product at random, and see whether a test fails.

    scripts/mutate [--count 20] [--seed N] [--room metaq/txn ...] [--json]

A mutant is one change by an operator of Cosmic Ray (a comparison, a number, a boolean,
a loop that never runs ...), or a call that is left out. They are sampled by the seed
over positions of `ROOMS`. Each is tried in a copy of the checkout: first by the tests
that are named after its module, then, where those pass, by others of its room, as
`nearest_tests` says. A mutant that passes all has survived: a promise without a test,
or a line without a use. Tests run once without a mutant: they have to pass, and a
mutant with which they take four times as long is found.

Exit codes: 0 all were found, 1 some survived.
"""

import argparse
import json
import os
import random
import re
import secrets
import shutil
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final, TypeAlias

import cosmic_ray.ast as trees  # before the operators, which import it halfway
import pytest
from cosmic_ray.mutating import mutate_code
from cosmic_ray.plugins import get_operator, operator_names

ROOT: Final = Path(__file__).parent.parent
ROOMS: Final = (
    "metaq/storage", "metaq/txn", "metaq/client", "metaq/queues", "metaq/delay",
    "metaq/routing", "metaq/filter", "metaq/replication", "metaq/spark/sink",
)  # fmt: skip
OMITTED: Final = ("BitOr_", "RemoveDecorator", "VariableInserter", "VariableReplacer")
"""Operators that change annotations and decorators, or make unknown names."""
SLOWER_MAX: Final = 4.0
"""Times as long as without a mutant: tests that take longer have found it."""
TIMEOUT_S_MIN: Final = 60.0


class LeaveOutCall:
    """Operator: a call whose result is not used is not made."""

    def mutation_positions(self, node: Any) -> Iterator[tuple[Any, Any]]:
        """Yield the position of a statement that is one call."""
        if _is_call(node):
            yield node.start_pos, node.end_pos

    def mutate(self, node: Any, _index: int) -> Any:
        """Return `pass` in its place."""
        statement = trees.get_ast("pass\n").children[0].children[0]
        statement.prefix = node.get_first_leaf().prefix
        return statement


def _is_call(node: Any) -> bool:
    parent = node.parent
    return (
        node.type == "atom_expr"
        and parent is not None
        and parent.type == "simple_stmt"
        and node.children[-1].type == "trailer"
        and node.children[-1].children[0].value == "("
    )


@dataclass(frozen=True, slots=True)
class Mutant:
    """One change of one module."""

    module: str
    line: int
    operator: str
    occurrence: int
    """Position of the operator in the module, counted from 0."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """A mutant after its tests."""

    mutant: Mutant
    before: str
    after: str
    found_by: str | None
    """Test that failed, or "time-out"; None: it survived."""


def _operators() -> dict[str, Any]:
    named = {
        name: get_operator(name)()
        for name in sorted(operator_names())
        if not any(word in name for word in OMITTED)
    }
    return {**named, "leave-out-call": LeaveOutCall()}


def find_mutants(modules: Sequence[str], operators: dict[str, Any]) -> list[Mutant]:
    """Return one mutant for each position and kind of operator, in order."""
    found: list[Mutant] = []
    for module in modules:
        tree = trees.get_ast((ROOT / module).read_text())
        nodes = list(trees.ast_nodes(tree))
        for name, operator in operators.items():
            positions = [
                (start[0], node)
                for node in nodes
                for start, _ in operator.mutation_positions(node)
            ]
            found += [
                Mutant(module, line, name, number)
                for number, (line, node) in enumerate(positions)
                if not _is_declared(node)
            ]
    return found


def _is_declared(node: Any) -> bool:
    """Whether a change is none of what runs: the star of parameters, a decorator."""
    is_star = node.type == "operator" and node.parent.type == "parameters"
    return is_star or node.search_ancestor("decorator") is not None


def choose(mutants: Sequence[Mutant], count: int, seed: int) -> list[Mutant]:
    """Return a sample: lines by chance, and one of the mutants of each."""
    chance = random.Random(seed)
    by_line = defaultdict[tuple[str, int], list[Mutant]](list)
    for each in mutants:
        by_line[each.module, each.line].append(each)
    lines = chance.sample(sorted(by_line), min(count, len(by_line)))
    return [chance.choice(by_line[line]) for line in lines]


SESSION: Final = re.compile("SparkSession|drivers: Drivers")
"""In tests with a session of Spark."""
Tests: TypeAlias = tuple[str, ...]
"""Files for pytest."""


def nearest_tests(module: str) -> list[Tests]:
    """Return test files of a module's room: named after it, importing it, all.

    Those with a session of Spark are slow, and only tried where they have its name.
    """
    parts = Path(module).with_suffix("").parts
    room = next(
        ROOT / "tests" / Path(*parts[1:end])
        for end in range(len(parts) - 1, 0, -1)
        if (ROOT / "tests" / Path(*parts[1:end])).is_dir()
    )
    texts = {p: p.read_text() for p in sorted(room.rglob("test_*.py"))}
    of_session = [p for p, text in texts.items() if SESSION.search(text)]
    named = [p for p in texts if p.name.startswith(f"test_{parts[-1]}")]
    importing = [p for p, text in texts.items() if ".".join(parts) in text]
    found, seen = list[Tests](), set[Path]()
    for paths in (
        [p for p in named if p not in of_session],
        [p for p in importing if p not in of_session],
        named,
        [p for p in texts if p not in of_session],
    ):
        if new := [p for p in paths if p not in seen]:
            seen.update(new)
            found.append(tuple(str(p.relative_to(ROOT)) for p in new))
    return found


def try_mutant(
    mutant: Mutant, operator: Any, checkout: Path, limits_s: dict[Tests, float]
) -> Outcome:
    """Run tests, nearest first, with a mutant in a copy of the checkout.

    `limits_s` keeps how long tests may take; what it lacks runs without a mutant first.
    """
    path = checkout / mutant.module
    source = path.read_text()
    mutated = mutate_code(source, operator, mutant.occurrence)
    assert mutated is not None, mutant
    at = next(
        (
            n
            for n, (a, b) in enumerate(
                zip(_lines(source), _lines(mutated), strict=False)
            )
            if a != b
        ),
        mutant.line - 1,
    )
    found_by = None
    for tests in nearest_tests(mutant.module):
        if tests not in limits_s:
            limits_s[tests] = _limit_s(tests, checkout)
        try:
            path.write_text(mutated)
            found_by = _first_failure(tests, checkout, limits_s[tests])
        finally:
            path.write_text(source)
        if found_by:
            break
    return Outcome(mutant, _lines(source)[at], _lines(mutated)[at], found_by)


def _lines(source: str) -> list[str]:
    return [line.strip() for line in source.splitlines()]


def _limit_s(tests: Tests, checkout: Path) -> float:
    began_s = time.monotonic()
    if failure := _first_failure(tests, checkout, None):
        sys.exit(f"{' '.join(tests)}: red without a mutant: {failure}")
    return max(TIMEOUT_S_MIN, SLOWER_MAX * (time.monotonic() - began_s))


def _first_failure(tests: Tests, checkout: Path, timeout_s: float | None) -> str | None:
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-x",
        "-q",
        "-rfE",
        "-p",
        "no:cacheprovider",
    ]
    environment = {**os.environ, "PYTHONPATH": str(checkout)}
    try:
        done = subprocess.run(
            [*command, *tests],
            cwd=checkout,
            env=environment,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return "time-out"
    if done.returncode in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
        return None
    named = [
        n
        for n in done.stdout.splitlines()
        if n.startswith(("FAILED tests", "ERROR tests"))
    ]
    return named[0] if named else f"exit code {done.returncode}"


def _copy_checkout(directory: Path) -> Path:
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    for name in listed.stdout.splitlines():
        if (ROOT / name).is_file():
            target = directory / name
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, target)
    if (ROOT / ".cache").exists():
        (directory / ".cache").symlink_to(ROOT / ".cache")
    return directory


def main() -> int:
    """Try a sample; return the exit code."""
    parser = argparse.ArgumentParser(prog="scripts/mutate", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--count", type=int, default=20, help="mutants to try")
    parser.add_argument("--seed", type=int, default=secrets.randbits(32))
    parser.add_argument("--room", nargs="+", default=ROOMS, help="files or directories")
    parser.add_argument("--json", action="store_true", help="one object a line")
    asked = parser.parse_args()
    operators = _operators()
    modules = [
        str(path.relative_to(ROOT))
        for room in asked.room
        for path in sorted(
            (ROOT / room).rglob("*.py") if (ROOT / room).is_dir() else [ROOT / room]
        )
    ]
    mutants = choose(find_mutants(modules, operators), asked.count, asked.seed)
    survivors, limits_s = 0, dict[Tests, float]()
    with tempfile.TemporaryDirectory(prefix="mutants-") as directory:
        checkout = _copy_checkout(Path(directory))
        for number, mutant in enumerate(mutants, 1):
            outcome = try_mutant(mutant, operators[mutant.operator], checkout, limits_s)
            survivors += outcome.found_by is None
            if asked.json:
                print(json.dumps(asdict(outcome)), flush=True)
                continue
            print(f"{number}/{len(mutants)} {mutant.module}:{mutant.line}", flush=True)
            print(f"    - {outcome.before}\n    + {outcome.after}")
            print(f"    {outcome.found_by or 'SURVIVED'}", flush=True)
    if not asked.json:
        print(f"{len(mutants)} mutants, {survivors} survived, --seed {asked.seed}")
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main())
