"""Output table: medians with their range, and the ratio to the floor.

The columns floor and broker are of real lines; a column has the broker's rate with
one length.
"""

import os
import platform
import statistics
from pathlib import Path

from rich.console import Console
from rich.table import Table

from bench.figures import Figure


def machine_card() -> str:
    """Return one line about the machine; figures mean nothing without it."""
    model = "unknown processor"
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            model = line.split(":", 1)[1].strip()
            break
    # With a shared library, calls into the interpreter take an indirection.
    is_shared = "/libpython" in Path("/proc/self/maps").read_text()
    return (
        f"{os.cpu_count()} cores, {model}, {platform.system()} {platform.release()}, "
        f"{platform.python_implementation()} {platform.python_version()}"
        f"{' in a shared library' if is_shared else ''}"
    )


def number(value: float) -> str:
    if value >= 1000:
        return f"{value:,.0f}"
    return f"{value:.1f}" if value >= 10 else f"{value:.3f}"


def cell(samples: list[float]) -> str:
    if not samples:
        return "-"
    low, high = number(min(samples)), number(max(samples))
    return f"{number(statistics.median(samples))}\n{low} .. {high}"


def print_table(figures: list[Figure]) -> None:
    table = Table(
        "figure", "unit", "floor", "broker", "ratio", "one length", "at least", "aim"
    )
    for column in table.columns[2:6]:
        column.justify = "right"
    for figure in figures:
        ratio = "-" if figure.ratio is None else f"{figure.ratio:.2f}"
        table.add_row(
            figure.name,
            figure.unit,
            cell(figure.floor),
            cell(figure.broker),
            ratio,
            cell(figure.one_length),
            figure.at_least,
            figure.aim,
        )
    Console(width=170).print(table)
