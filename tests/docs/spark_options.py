"""The table of docs/spark.md, made from the options themselves."""

from pathlib import Path

from metaq.spark.option_table import OPTIONS, OptionSpec, Use

PAGE = Path(__file__).parents[2] / "docs" / "spark.md"
HEAD = "| option | default | for | meaning |\n|---|---|---|---|\n"
SHORT = {
    Use.BATCH: "batch",
    Use.STREAM: "stream",
    Use.SINK: "writes",
    Use.SEGMENTS: "segments",
}


def table() -> str:
    """Return the rows, in the order of the options."""
    return "".join(map(_row, OPTIONS))


def _row(spec: OptionSpec) -> str:
    default = "" if spec.default is None else f"`{spec.default}`"
    uses = ", ".join(SHORT[use] for use in Use if use in spec.uses)
    meaning = spec.meaning.replace("|", "\\|")
    if spec.choices:
        names = ", ".join(f"`{name}`" for name in spec.choices)
        meaning = f"{meaning} One of {names}{', or JSON' if _takes_json(spec) else ''}."
    return f"| `{spec.name}` | {default} | {uses} | {meaning} |\n"


def _takes_json(spec: OptionSpec) -> bool:
    return "JSON" in spec.kind.value


def write() -> None:
    """Write the table into the page: `python -m tests.docs.spark_options`."""
    before, head, after = PAGE.read_text().partition(HEAD)
    assert head
    rest = after[after.index("\n## ") :]
    PAGE.write_text(before + head + table() + rest)


if __name__ == "__main__":
    write()
