"""`metaq pipeline run` that passes the steps of its updates: `... WORDS`.

It leads a group of processes, to which its JVM and the executors belong.
"""

import json
import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

from metaq.cli.main import main
from metaq.pipeline.declared import updates
from tests.spark.kills.steps import DIRECTORY, DRIVER_GROUP, reach

start_run = updates.start_run


def dying_run(*words: Any, **more: Any) -> Iterator[Mapping[str, Any]]:
    """Yield the events of an update; each is about a step."""
    reach("definitions sent")
    for each in start_run(*words, **more):
        event = each.get("pipeline_event_result")
        if event is not None:
            # "Flow lines is RUNNING.\n…": "flow running"
            words = event.event.message.partition("\n")[0].lower().split()
            reach(f"{words[0]} {words[-1].rstrip('.')}")
        yield each


if __name__ == "__main__":
    Path(os.environ[DIRECTORY], DRIVER_GROUP).write_text(json.dumps(os.getpid()))
    with mock.patch.object(updates, "start_run", dying_run):
        main(["pipeline", "run", *sys.argv[1:]])
