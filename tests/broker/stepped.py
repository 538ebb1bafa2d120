"""Parts of the random machines over services of a broker: its context, and its end."""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from metaq.broker.context import BrokerContext
from metaq.broker.realtime import Realtime
from metaq.config.settings import BrokerConfig
from tests.rigs.fs import FaultyFileSystem, Operation
from tests.txn.support import TransactionBench

B = TypeVar("B")


def context_on(
    bench: TransactionBench, config: BrokerConfig, **parts: Any
) -> BrokerContext:
    """Return the context of a broker over a bench, which lacks the parts not given."""
    names = ("waiters", "upkeep", "load", "turns", "filter_work")
    return BrokerContext(
        config=config,
        clock=bench.clock,
        topics=bench.topics,
        transactions=bench.coordinator,
        ids=bench.ids,
        realtime=Realtime(bench.clock),
        fs=bench.fs,
        address="meta://test:1",
        port=1,
        started_s=0.0,
        **{name: parts.get(name) for name in names},
    )


@contextmanager
def cut_at_sync(
    fs: FaultyFileSystem, number: int, book: Callable[[], B]
) -> Iterator[list[tuple[FaultyFileSystem, B]]]:
    """Copy a disk and a book at the sync of that number, from 0, within the block.

    The first entry of the list has them; where the block has fewer syncs, as it ends.
    """
    left, found = number, list[tuple[FaultyFileSystem, B]]()

    def take() -> None:
        found.append((fs.snapshot(), copy.deepcopy(book())))

    def on_call(operation: Operation) -> None:
        nonlocal left
        if operation.name in {"sync", "sync_directory"}:
            if not left:
                take()
            left -= 1

    fs.on_call(on_call)
    try:
        yield found
    finally:
        fs.on_call(None)
    if not found:
        take()
