"""Every public name is documented and typed."""

import ast
from collections.abc import Iterator

from tests.house.tree import PROJECT, Tree

Function = ast.FunctionDef | ast.AsyncFunctionDef


def public_names(
    body: list[ast.stmt], prefix: str = ""
) -> Iterator[tuple[str, Function | ast.ClassDef, bool]]:
    """Yield (dotted name, node, is a method), also from under `if` and `try`."""
    for node in body:
        if isinstance(node, ast.If | ast.Try):
            yield from public_names(node.body + node.orelse, prefix)
        if not isinstance(node, Function | ast.ClassDef) or node.name.startswith("_"):
            continue
        yield f"{prefix}{node.name}", node, bool(prefix)
        if isinstance(node, ast.ClassDef):
            yield from public_names(node.body, f"{prefix}{node.name}.")


def documentation_faults(tree: Tree) -> list[str]:
    faults = []
    for path in tree.sources:
        module = tree.nodes(path)[0]
        assert isinstance(module, ast.Module)
        if not ast.get_docstring(module):
            faults.append(f"{tree.rel(path)} has no docstring")
        for name, node, _ in public_names(module.body):
            if not ast.get_docstring(node) and not is_overload(node):
                faults.append(f"{tree.rel(path)}: {name} has no docstring")
    return faults


def is_overload(node: Function | ast.ClassDef) -> bool:
    return any(
        (isinstance(d, ast.Name) and d.id == "overload")
        or (isinstance(d, ast.Attribute) and d.attr == "overload")
        for d in node.decorator_list
    )


def annotation_faults(tree: Tree) -> list[str]:
    faults = []
    for path in tree.sources:
        module = tree.nodes(path)[0]
        assert isinstance(module, ast.Module)
        for name, node, is_method in public_names(module.body):
            if isinstance(node, ast.ClassDef):
                continue
            if node.returns is None:
                faults.append(f"{tree.rel(path)}: {name} does not say what it returns")
            faults += [
                f"{tree.rel(path)}: {name} does not say what {argument} is"
                for argument in bare_arguments(node, is_method)
            ]
    return faults


def bare_arguments(node: Function, is_method: bool) -> list[str]:
    static = any(
        isinstance(d, ast.Name) and d.id == "staticmethod" for d in node.decorator_list
    )
    names = node.args.posonlyargs + node.args.args
    names = names[1:] if is_method and not static else names
    names = names + node.args.kwonlyargs
    names += [a for a in (node.args.vararg, node.args.kwarg) if a is not None]
    return [a.arg for a in names if a.annotation is None]


def test_every_public_name_is_documented() -> None:
    """Modules, classes, functions and methods without underscore have a docstring."""
    assert documentation_faults(PROJECT) == []


def test_every_public_name_is_typed() -> None:
    """Each argument and each return of a public function has its annotation."""
    assert annotation_faults(PROJECT) == []
