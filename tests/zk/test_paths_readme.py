"""The table of nodes says what the code says."""

import re
from pathlib import Path

import metaq.zk
from metaq.zk.paths import NodeKind

README = Path(metaq.zk.__file__).parent / "README.md"


def test_the_table_of_nodes_equals_the_templates() -> None:
    """Each node kind has one row with its path, and no row is left over."""
    rows = re.findall(r"^\| ([^|]+) \| `(/[^`]+)` \|", README.read_text(), re.MULTILINE)
    assert dict(rows) == {kind.purpose: kind.template for kind in NodeKind}
