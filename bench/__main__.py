"""Run the benchmarks: `scripts/bench [FIGURE ...] [--rounds N] [--json]`."""

import argparse
import json
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path

from bench import (
    consuming,
    fairness,
    figures,
    java_broker,
    partitions,
    producing,
    spark_archive,
    spark_audit,
    spark_figures,
    spark_kafka,
    spark_start,
    spark_wire,
    transactions,
)
from bench.figures import Figure
from bench.report import machine_card, print_table
from metaq.zk.embedded import EmbeddedZooKeeperError
from tests.java.jars import NoJarsError

FIGURES = {
    **figures.FIGURES,
    **partitions.FIGURES,
    **fairness.FIGURES,
    **transactions.FIGURES,
    "closed-loop-metaq": java_broker.closed_loop,
    "send": producing.send_alone,
    "send-many": producing.send_many,
    "send-nowait": producing.send_nowait,
    "send-nowait-async": producing.send_nowait_in_loop,
    "send-nowait-metaq": java_broker.send_nowait,
    "producer-cpu": producing.unanswered,
    "iterate": consuming.iterate,
    "iterate-async": consuming.iterate_in_loop,
    "delivery": consuming.delivery,
    "consumer-memory": consuming.consumer_memory,
    "spark-segments": spark_figures.segments,
    "spark-archive-first": spark_archive.first,
    "spark-archive-warm": spark_archive.warm,
    "spark-archive": spark_archive.rate,
    "spark-archive-memory": spark_archive.memory,
    "spark-audit": spark_audit.audit,
    "spark-replay": spark_audit.put_back,
    "spark-read": spark_wire.read,
    "spark-write": spark_wire.write,
    "spark-kafka-read": spark_kafka.read,
    "spark-kafka-write": spark_kafka.write,
    "spark-write-keyed": spark_wire.write_keyed,
    "spark-import": spark_start.imports,
    "spark-import-task": spark_start.task_imports,
    "spark-visible": spark_start.visible,
    "spark-exactly-once": spark_wire.write_exactly_once,
    "spark-exactly-once-batch": spark_wire.batch_exactly_once,
    "spark-overhead": spark_wire.overhead,
    "spark-idle": spark_wire.idle,
}


def main() -> None:
    parser = argparse.ArgumentParser(prog="scripts/bench", description=__doc__)
    parser.add_argument("figures", nargs="*", metavar="FIGURE", help=", ".join(FIGURES))
    parser.add_argument("--rounds", type=int, default=5, help="samples of each side")
    parser.add_argument("--json", action="store_true", help="one object per figure")
    parser.add_argument("--directory", type=Path, help="on the disk to be measured")
    options = parser.parse_args()
    unknown = set(options.figures) - set(FIGURES)
    if unknown:
        parser.error(
            f"no figure {', '.join(sorted(unknown))}; have {', '.join(FIGURES)}"
        )
    done: list[Figure] = []
    for name in options.figures or FIGURES:
        print(f"measuring {name} ...", file=sys.stderr, flush=True)
        with tempfile.TemporaryDirectory(
            prefix="metaq-bench-", dir=options.directory
        ) as directory:
            try:
                figure = FIGURES[name](Path(directory), options.rounds)
            except (NoJarsError, EmbeddedZooKeeperError) as error:
                print(f"skipped {name}: {error}", file=sys.stderr, flush=True)
                continue
        done.append(figure)
        if options.json:
            print(json.dumps({**asdict(figure), "ratio": figure.ratio}), flush=True)
    if not options.json:
        print(machine_card())
        print_table(done)


if __name__ == "__main__":
    main()
