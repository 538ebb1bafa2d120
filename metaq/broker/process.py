"""Runs a broker as a process, with its signals and its end."""

import asyncio
import gc
import logging
import resource
import signal
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Final

from metaq.broker.app import Broker
from metaq.config.settings import BrokerConfig
from metaq.errors import MetaqError
from metaq.net.listener import limit_accept_errors

_log = logging.getLogger(__name__)

SWITCH_INTERVAL_S: Final = 0.0001
"""Maximum time for which the storage thread waits for the interpreter after an fsync;
Python's default of 5 ms would be most of the latency of a put under load."""

FULL_COLLECTION_EVERY: Final = 100
"""Number of collections of the middle generation before a full one, which takes 35 ms
with 100,000 waiting gets. Python's default is 10."""


async def run_broker(
    config: BrokerConfig,
    *,
    overrides: Mapping[str, str] | None = None,
    on_ready: Callable[[Broker], None] | None = None,
) -> None:
    """Run a broker until SIGTERM or SIGINT; SIGHUP reloads its configuration.

    SIGTERM and SIGINT also end a start; SIGHUP during the start takes effect after it.

    Args:
        config: its settings.
        overrides: overrides of the settings, for reloads.
        on_ready: called once after the start.

    Raises:
        MetaqError: the broker could not start, or a part of it failed later.
    """
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    _take_descriptors()
    loop = asyncio.get_running_loop()
    limit_accept_errors(loop)
    is_over = asyncio.Event()
    broker = Broker(
        config, overrides=overrides, on_failure=lambda _broker, _error: is_over.set()
    )
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, is_over.set)
    # Signals during a reload cause one more reload.
    is_reload_wanted = asyncio.Event()
    loop.add_signal_handler(signal.SIGHUP, is_reload_wanted.set)
    starter = loop.create_task(broker.start(), name="broker.run")
    waiter = loop.create_task(is_over.wait(), name="broker.over")
    reloader: asyncio.Task[None] | None = None
    try:
        await asyncio.wait((starter, waiter), return_when=asyncio.FIRST_COMPLETED)
        if not starter.done():
            starter.cancel()
            await asyncio.wait([starter])
            return
        await starter
        # The objects of a broker live as long as the process. Frozen, they do not take
        # the garbage collector 25 ms each time.
        gc.collect()
        gc.freeze()
        gc.set_threshold(*gc.get_threshold()[:2], FULL_COLLECTION_EVERY)
        reloads = _reload_when(is_reload_wanted, broker)
        reloader = loop.create_task(reloads, name="broker.reload")
        if on_ready is not None:
            on_ready(broker)
        await waiter
    finally:
        waiter.cancel()
        if reloader is not None:
            reloader.cancel()
        await broker.stop()
    _log.info("broker stopped: broker=%d", config.system.broker_id)
    if broker.failure is not None:
        raise MetaqError(f"the broker failed: {broker.failure}") from broker.failure


def _take_descriptors() -> None:
    """Raise the soft limit of open files to the hard one, as the Java VM does.

    The usual soft limit of 1024 is for programs that use `select`; a broker keeps two
    files of each partition open.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


async def _reload_when(is_wanted: asyncio.Event, broker: Broker) -> None:
    """Reload on SIGHUP; errors are logged."""
    while True:
        await is_wanted.wait()
        is_wanted.clear()
        try:
            await broker.control.reload()
        except MetaqError:
            _log.warning("reload by signal had no effect")
        except Exception:  # noqa: BLE001  # a bug in one reload must not end the next
            _log.exception("reload by signal failed")
