"""The tables of options in docs/reference.md, made from fields and docstrings."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
SOURCES = [
    ROOT / "metaq" / name
    for name in ("peer/options.py", "client/options.py", "client/consume/redelivery.py")
]
TITLES = {
    "ClientOptions": "Options of `Client`, `AsyncClient`",
    "ProducerOptions": "Options of `client.producer`",
    "ConsumerOptions": "Options of `client.consumer`",
    "QueueOptions": "Options of `client.queue`",
    "RetryPolicy": "Options of `RetryPolicy`",
}
"""Class → title of its section."""


def tables() -> dict[str, str]:
    """Return the rows of each section, by the name of its class."""
    classes = {
        node.name: node
        for path in SOURCES
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.ClassDef)
    }
    found = {}
    for name in TITLES:
        bases = [b.id for b in classes[name].bases if isinstance(b, ast.Name)]
        rows = [row for one in (name, *bases) for row in _rows(classes[one])]
        found[name] = "\n".join(rows)
    return found


def _rows(node: ast.ClassDef) -> list[str]:
    rows = []
    for field, text in zip(node.body, node.body[1:], strict=False):
        if not isinstance(field, ast.AnnAssign) or field.value is None:
            continue
        assert isinstance(text, ast.Expr)
        assert isinstance(text.value, ast.Constant)
        meaning = " ".join(str(text.value.value).split())
        assert isinstance(field.target, ast.Name)
        default = _default(field.value)
        rows.append(f"| `{field.target.id}` | `{default}` | {meaning} |")
    return rows


def _default(value: ast.expr) -> str:
    text = ast.unparse(value).replace("'", '"')
    text = re.sub(r"^MIB$", "1 MiB", text).replace(" * MIB", " MiB")
    return text.replace("DEFAULT_ROOT", '"/meta"')
