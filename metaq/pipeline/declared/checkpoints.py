"""Progress of a declared pipeline, as its checkpoints show it; no Spark is asked."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from metaq.model import Millis

_LOCAL: Final = re.compile(r"(?:file:(?://)?)?(/.*)", re.DOTALL)
"""A path of this machine."""
ESCAPED: Final = re.compile(r"[^\w\-!.~'()*,;:$&+=/@\x80-\U0010ffff]")
"""Spark escapes them in the path of a storage, and uses the result as names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FlowStatus:
    """A flow, by its checkpoint."""

    flow: str
    target: str
    batch: int | None
    """The last finished micro-batch; None for none."""
    finished_ms: Millis | None


def flows_of(storage: str) -> list[FlowStatus]:
    """Return the flows that have a checkpoint, by target and name.

    Args:
        storage: of a pipeline, as path or URL; none is seen where that is not one of
            this machine.
    """
    local = _LOCAL.fullmatch(storage)
    if local is None:
        return []
    place = ESCAPED.sub(lambda found: f"%{ord(found[0]):02X}", local[1])
    root = Path(place) / "_checkpoints"
    # <target, a step for each part of its name>/<flow>/<version>/commits/<batch>
    found = [
        _flow_status(root, path)
        for path in root.glob("**/[0-9]*/metadata")
        if path.is_file()
    ]
    found.sort(key=lambda pair: pair[0])
    newest = {(each.target, each.flow): each for _version, each in found}
    return [newest[key] for key in sorted(newest)]


def _flow_status(root: Path, metadata: Path) -> tuple[int, FlowStatus]:
    version = metadata.parent
    commits = {
        int(path.name): path
        for path in version.glob("commits/*")
        if path.name.isdigit()
    }
    last = max(commits, default=None)
    steps = version.relative_to(root).parts
    return int(version.name), FlowStatus(
        flow=steps[-2],
        target=steps[-3],
        batch=last,
        finished_ms=(
            None if last is None
            else Millis(round(commits[last].stat().st_mtime * 1000))
        ),
    )  # fmt: skip
