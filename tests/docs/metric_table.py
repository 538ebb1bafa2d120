"""The table of metrics of docs/client.md, made from the code's own."""

from metaq.client.metric_table import METRICS
from tests.docs.option_tables import PAGE

HEAD = "| metric | type | labels | meaning |\n|---|---|---|---|\n"


def table() -> str:
    """Return the rows, in the order of a scrape."""
    rows = ""
    for spec in METRICS:
        labels = ", ".join(f"`{label}`" for label in spec.labels) or "-"
        meaning = spec.help.removesuffix(".")
        rows += f"| `{spec.name}` | {spec.kind} | {labels} | {meaning} |\n"
    return rows


def write() -> None:
    """Write the table into the page: `python -m tests.docs.metric_table`."""
    before, head, rest = PAGE.read_text().partition(HEAD)
    after = rest[rest.index("\n## ") :]
    PAGE.write_text(before + head + table() + after)


if __name__ == "__main__":
    write()
