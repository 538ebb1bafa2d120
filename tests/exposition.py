"""Pages of metrics as they were once told: what dashboards and alerts rely on."""

from pathlib import Path

GOLDEN = Path(__file__).parent / "golden" / "metrics"


def blocks(page: str) -> dict[str, str]:
    """Return the lines of each family by its name, but for the process's own."""
    found: dict[str, str] = {}
    for line in page.splitlines():
        if line.startswith("# HELP "):
            name = line.split()[2]
        found[name] = found.get(name, "") + line + "\n"
    return {name: text for name, text in found.items() if name.startswith("metaq_")}


def changed(page: str, golden: str) -> dict[str, str | None]:
    """Return the families that a page tells in other bytes than the golden one did.

    Args:
        page: the page as it is now; families may have come, and in any order.
        golden: name of the file in `tests/golden/metrics`, which only grows.
    """
    now, then = blocks(page), blocks((GOLDEN / golden).read_text())
    assert then
    return {name: now.get(name) for name in then if now.get(name) != then[name]}
