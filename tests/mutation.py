"""Change one line of the product at random, and see whether a test fails.

    scripts/mutate [--count 20] [--seed N] [--room metaq/txn ...] [--json]

A mutant is one change by an operator of Cosmic Ray (a comparison, a number, a boolean,
a loop that never runs ...), or a call that is left out. They are sampled by the seed
over positions of `ROOMS`. Each is tried in a copy of the checkout: first by the tests
that are named after its module, then, where those pass, by all tests of its room. A
mutant that passes both has survived: a promise without a test, or a line without a use.

Exit codes: 0 all were found, 1 some survived.
"""

import argparse
import json
import os
import random
import secrets
import shutil
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import cosmic_ray.ast as trees  # before the operators, which import it halfway
from cosmic_ray.mutating import mutate_code
from cosmic_ray.plugins import get_operator, operator_names

ROOT: Final = Path(__file__).parent.parent
ROOMS: Final = (
    "metaq/storage", "metaq/txn", "metaq/client", "metaq/queues", "metaq/delay",
    "metaq/routing", "metaq/filter", "metaq/replication", "metaq/spark/sink",
)  # fmt: skip
OMITTED: Final = ("BitOr_", "RemoveDecorator", "VariableInserter", "VariableReplacer")
"""Operators that change annotations and decorators, or make unknown names."""
TIMEOUT_S: Final = 600.0
"""For the tests of one mutant; one that takes longer is found."""


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
            positions = [p for node in nodes for p in operator.mutation_positions(node)]
            found += [
                Mutant(module, start[0], name, number)
                for number, (start, _) in enumerate(positions)
            ]
    return found


def choose(mutants: Sequence[Mutant], count: int, seed: int) -> list[Mutant]:
    """Return a sample: lines by chance, and one of the mutants of each."""
    chance = random.Random(seed)
    by_line = defaultdict[tuple[str, int], list[Mutant]](list)
    for each in mutants:
        by_line[each.module, each.line].append(each)
    lines = chance.sample(sorted(by_line), min(count, len(by_line)))
    return [chance.choice(by_line[line]) for line in lines]


def nearest_tests(module: str) -> list[list[str]]:
    """Return the test files named after a module, then the tests of its room."""
    parts = Path(module).with_suffix("").parts
    room = next(
        ROOT / "tests" / Path(*parts[1:end])
        for end in range(len(parts) - 1, 0, -1)
        if (ROOT / "tests" / Path(*parts[1:end])).is_dir()
    )
    named = sorted(
        str(p.relative_to(ROOT)) for p in room.rglob(f"test_{parts[-1]}*.py")
    )
    return [*([named] if named else []), [str(room.relative_to(ROOT))]]


def try_mutant(mutant: Mutant, operator: Any, checkout: Path) -> Outcome:
    """Run tests, nearest first, with a mutant in a copy of the checkout."""
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
    try:
        path.write_text(mutated)
        found_by = None
        for tests in nearest_tests(mutant.module):
            found_by = _first_failure(tests, checkout)
            if found_by:
                break
    finally:
        path.write_text(source)
    return Outcome(mutant, _lines(source)[at], _lines(mutated)[at], found_by)


def _lines(source: str) -> list[str]:
    return [line.strip() for line in source.splitlines()]


def _first_failure(tests: Sequence[str], checkout: Path) -> str | None:
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
            timeout=TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return "time-out"
    if done.returncode == 0:
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
    survivors = 0
    with tempfile.TemporaryDirectory(prefix="mutants-") as directory:
        checkout = _copy_checkout(Path(directory))
        for number, mutant in enumerate(mutants, 1):
            outcome = try_mutant(mutant, operators[mutant.operator], checkout)
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
