"""Run the benchmarks: `scripts/bench [FIGURE ...] [--rounds N] [--json]`.

`--lines FILE...` names the log files whose lines are sent.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path

from bench import (
    committing,
    consuming,
    copying,
    delays,
    fairness,
    figures,
    filtering,
    finding,
    java_broker,
    kafka,
    partitions,
    producing,
    queues,
    replicas,
    requests,
    rocketmq,
    routing,
    spark_archive,
    spark_audit,
    spark_figures,
    spark_kafka,
    spark_start,
    spark_wire,
    transactions,
)
from bench.figures import Figure, WithLines
from bench.lines import find_lines
from bench.report import machine_card, print_table
from metaq.zk.embedded import EmbeddedZooKeeperError
from tests.java.jars import NoJarsError

FIGURES: dict[str, Callable[[Path, int], Figure] | WithLines] = {
    **figures.FIGURES,
    **partitions.FIGURES,
    **fairness.FIGURES,
    **transactions.FIGURES,
    **java_broker.FIGURES,
    **kafka.FIGURES,
    **producing.FIGURES,
    **consuming.FIGURES,
    **filtering.FIGURES,
    **committing.FIGURES,
    **copying.FIGURES,
    **finding.FIGURES,
    **queues.FIGURES,
    **delays.FIGURES,
    **rocketmq.FIGURES,
    **requests.FIGURES,
    **replicas.FIGURES,
    **routing.FIGURES,
    **spark_figures.FIGURES,
    **spark_archive.FIGURES,
    **spark_audit.FIGURES,
    "spark-import": spark_start.imports,
    "spark-import-task": spark_start.task_imports,
    "spark-visible": spark_start.visible,
    **spark_wire.FIGURES,
    **spark_kafka.FIGURES,
}


def main() -> None:
    parser = argparse.ArgumentParser(prog="scripts/bench", description=__doc__)
    parser.add_argument("figures", nargs="*", metavar="FIGURE", help=", ".join(FIGURES))
    parser.add_argument("--rounds", type=int, default=5, help="samples of each side")
    parser.add_argument("--json", action="store_true", help="one object per figure")
    parser.add_argument("--directory", type=Path, help="on the disk to be measured")
    parser.add_argument(
        "--lines", nargs="+", type=Path, metavar="FILE", default=(),
        help="log files to send; without them the machine's own",
    )  # fmt: skip
    options = parser.parse_args()
    unknown = set(options.figures) - set(FIGURES)
    if unknown:
        parser.error(
            f"no figure {', '.join(sorted(unknown))}; have {', '.join(FIGURES)}"
        )
    lines = find_lines(options.lines)
    done: list[Figure] = []
    usual = [name for name in FIGURES if name != finding.MANY]
    for name in options.figures or usual:
        print(f"measuring {name} ...", file=sys.stderr, flush=True)
        with tempfile.TemporaryDirectory(
            prefix="metaq-bench-", dir=options.directory
        ) as directory:
            try:
                measure = FIGURES[name]
                if isinstance(measure, WithLines):
                    measure = partial(measure, lines=lines)
                figure = measure(Path(directory), options.rounds)
            except (NoJarsError, EmbeddedZooKeeperError) as error:
                print(f"skipped {name}: {error}", file=sys.stderr, flush=True)
                continue
        done.append(figure)
        if options.json:
            row = {"figure": name, **asdict(figure), "ratio": figure.ratio}
            print(json.dumps(row), flush=True)
    if not options.json:
        print(f"{machine_card()}\n{lines}")
        print_table(done)


if __name__ == "__main__":
    main()
