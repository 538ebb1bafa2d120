"""Effect of a flood on one connection on the puts of another.

Each figure is the p99 of puts sent one at a time, first to a quiet broker, then during
a flood (`bench/flood.py`) from a separate process.
"""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from bench import flood, load
from bench.figures import PAYLOAD, TOPIC, Figure
from bench.processes import ROOT
from tests.rigs.process import BrokerProcess

COUNT = 400
SHARE = 0.99
PARTITIONS = 3
"""One each for the flood, the puts, and the long polls."""


def beside(form: str, directory: Path, rounds: int) -> Figure:
    """p99 of puts one at a time, on a quiet broker (floor) and during a flood."""
    figure = Figure(
        f"p99 of a put beside a flood of {form} (floor: no flood)",
        "ms",
        [],
        [],
        at_least="10",
        is_ratio=False,
    )
    frames = [load.put_frame(TOPIC, PAYLOAD, 1, 1)]
    with BrokerProcess(
        directory / "fairness",
        topic=TOPIC,
        partition_count=PARTITIONS,
        arguments=("--set", f"waitersMax={flood.POLLS}"),
    ) as broker:
        load.one_at_a_time(broker.port, frames, COUNT)  # warm up
        for _ in range(rounds):
            figure.floor.append(_p99_ms(load.one_at_a_time(broker.port, frames, COUNT)))
            with flooding(broker.port, form):
                samples = load.one_at_a_time(broker.port, frames, COUNT)
            figure.broker.append(_p99_ms(samples))
    return figure


@contextmanager
def flooding(port: int, form: str) -> Iterator[None]:
    """Flood a broker during the block."""
    command = [sys.executable, "-m", "bench.flood", str(port), TOPIC, form]
    child = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE)
    try:
        assert child.stdout is not None
        assert child.stdout.readline(), "the flood did not begin"
        yield
        assert child.poll() is None, "the flood ended"
    finally:
        child.kill()
        child.wait()
        if child.stdout:
            child.stdout.close()


def _p99_ms(samples: list[float]) -> float:
    return sorted(samples)[int(len(samples) * SHARE)] * 1e3


FIGURES = {
    f"fairness-{form.replace(' ', '-')}": partial(beside, form) for form in flood.ALL
}
