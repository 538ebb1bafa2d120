"""The source tree as the laws see it: modules, syntax trees and imports, read once."""

import ast
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Import:
    """One import: who is meant, by what name of our own, and where it stands."""

    target: str
    """Dotted name as written; a module where the name is one, else its container."""
    own: str | None
    """The target without `metaq.`, "" for the root, None for foreign code."""
    is_lazy: bool
    """It stands inside a function."""

    @property
    def head(self) -> str:
        """The first word: the layer of our own code, the library of foreign code."""
        return (self.target if self.own is None else self.own).split(".")[0]


@dataclass
class Tree:
    """A checkout, or a planted one: `metaq/` and what stands beside it."""

    root: Path
    modules: dict[str, Path] = field(init=False)
    """Dotted name without `metaq.` ("" is the root) to file."""
    _nodes: dict[Path, list[ast.AST]] = field(init=False, default_factory=dict)
    _imports: dict[str, list[Import]] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        self.modules = {}
        for path in sorted((self.root / "metaq").rglob("*.py")):
            parts = path.relative_to(self.root / "metaq").with_suffix("").parts
            self.modules[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = (
                path
            )

    def rel(self, path: Path) -> str:
        return path.relative_to(self.root).as_posix()

    @property
    def sources(self) -> list[Path]:
        return list(self.modules.values())

    @property
    def others(self) -> list[Path]:
        rooms = ("tests", "bench", "scripts")
        return [p for room in rooms for p in sorted((self.root / room).rglob("*.py"))]

    def nodes(self, path: Path) -> list[ast.AST]:
        """Return the nodes of the file's syntax tree, the module itself first."""
        if path not in self._nodes:
            self._nodes[path] = _walk(ast.parse(path.read_bytes()))
        return self._nodes[path]

    def forget(self) -> None:
        """Free the syntax trees: there are more of them than of all else in a run."""
        self._nodes.clear()

    def imports(self, name: str) -> list[Import]:
        """Return the imports of one of our modules."""
        if name not in self._imports:
            self._imports[name] = self.imports_of_file(self.modules[name])
        return self._imports[name]

    def imports_of_file(self, path: Path) -> list[Import]:
        nodes = self.nodes(path)
        kinds = ast.Import | ast.ImportFrom
        eager = {id(node) for node in _outside_functions(nodes[0])}
        return [
            Import(target, self._own(target), id(node) not in eager)
            for node in nodes
            if isinstance(node, kinds)
            for target in self._targets(node)
        ]

    def _targets(self, node: ast.Import | ast.ImportFrom) -> list[str]:
        if isinstance(node, ast.Import):
            return [alias.name for alias in node.names]
        base = "." * node.level + (node.module or "")
        full = [f"{base}.{alias.name}" for alias in node.names]
        return [f if f.removeprefix("metaq.") in self.modules else base for f in full]

    def _own(self, target: str) -> str | None:
        if target == "metaq":
            return ""
        return target.removeprefix("metaq.") if target.startswith("metaq.") else None


def _walk(module: ast.AST) -> list[ast.AST]:
    """Return what `ast.walk` gives, in its order, without contexts: in half the time.

    A third of the nodes are contexts of names: loads, stores and deletions.
    """
    nodes = [module]
    for node in nodes:
        for name in node._fields:
            value = getattr(node, name, None)
            if isinstance(value, list):
                nodes += [each for each in value if isinstance(each, ast.AST)]
            elif isinstance(value, ast.AST) and not isinstance(value, ast.expr_context):
                nodes.append(value)
    return nodes


def _outside_functions(module: ast.AST) -> Iterator[ast.AST]:
    """Yield the statements that run when a module is imported."""
    left = [module]
    while left:
        node = left.pop()
        yield node
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            left += [
                n for n in ast.iter_child_nodes(node) if not isinstance(n, ast.expr)
            ]


PROJECT = Tree(ROOT)
