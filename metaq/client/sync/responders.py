"""Responders of the sync world: handlers are plain functions, in threads."""

from collections.abc import Callable

from metaq.client.options import check_plain_function
from metaq.client.request.responder import AsyncResponder
from metaq.client.sync.derived import SyncPart, closing, like
from metaq.client.sync.queues import Queue, QueueMessage
from metaq.clock import Clock
from metaq.loop_thread import LoopThread


class Responder(SyncPart[AsyncResponder]):
    """Answers the requests of a topic, for any thread; see `AsyncResponder`."""

    def __init__(
        self, twin: AsyncResponder, thread: LoopThread, *, clock: Clock
    ) -> None:
        """Wrap the async twin; `Client.responder` is the way in."""
        super().__init__(twin, thread)
        self._queue = Queue(twin.queue, thread, clock=clock)

    close = closing(AsyncResponder.close)

    @like(AsyncResponder.run)
    def run(
        self,
        handler: Callable[[QueueMessage], bytes],
        *,
        concurrency: int = 1,
        timeout: float | None = None,
    ) -> None:
        """Call the handler for every request, in threads; see `AsyncResponder.run`."""
        check_plain_function("handler", handler)

        def handle(message: QueueMessage) -> None:
            data, error = None, None
            try:
                data = handler(message)
            except Exception as failure:  # noqa: BLE001  # the requester gets it
                error = failure
            self._thread.run(self._twin.conclude(message, data, error))

        with self._queue:
            self._queue.run(handle, concurrency=concurrency, timeout=timeout)
