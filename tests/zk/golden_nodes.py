"""Nodes that real brokers and clients of MetaQ wrote, and what they are."""

import json
import re
from pathlib import Path
from typing import Any

from metaq.zk.paths import DEFAULT_ROOT, NodeKind

GOLDEN: dict[str, list[dict[str, Any]]] = json.loads(
    (Path(__file__).parents[1] / "golden" / "vectors.json").read_text()
)["zookeeper"]


def kind_of(path: str) -> NodeKind | None:
    """Return the kind whose template a path fills in; None for a mere parent."""
    for kind in NodeKind:
        pattern = re.sub(r"\{\w+\}", "[^/]+", DEFAULT_ROOT + kind.template)
        if re.fullmatch(pattern, path):
            return kind
    return None
