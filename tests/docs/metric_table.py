"""The tables of metrics in pages of docs, made from code."""

from collections.abc import Iterable

from metaq.broker import http as broker_http
from metaq.pipeline.declared import progress
from metaq.prometheus import ExportedMetric
from tests.docs.option_tables import ROOT

HEAD = "| metric | type | labels | meaning |\n|---|---|---|---|\n"
TABLES = {
    "operations.md": broker_http.METRICS,
    "spark.md": progress.METRICS,
}


def table(metrics: Iterable[ExportedMetric]) -> str:
    """Return head and rows, in the order of a scrape."""
    rows = HEAD
    for spec in (metric.spec for metric in metrics):
        labels = ", ".join(f"`{label}`" for label in spec.labels) or "-"
        meaning = spec.help.removesuffix(".")
        rows += f"| `{spec.name}` | {spec.kind.value} | {labels} | {meaning} |\n"
    return rows


def write() -> None:
    """Write the tables into the pages: `python -m tests.docs.metric_table`."""
    for name, metrics in TABLES.items():
        page = ROOT / "docs" / name
        before, _, rest = page.read_text().partition(HEAD)
        after = rest[rest.index("\n\n") + 1 :]
        page.write_text(before + table(metrics) + after)


if __name__ == "__main__":
    write()
