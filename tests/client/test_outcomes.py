"""Outcomes of requests: a batch ends with its last one, by the first failure."""

import asyncio
from typing import Any

from metaq.client.options import ProducerOptions
from metaq.client.produce.attempts import AttemptLimits, BatchSpan
from metaq.client.produce.batches import BatchOutcome, SendResult
from metaq.client.produce.buffer import Buffer
from metaq.client.produce.outcomes import SendOutcomes
from metaq.client.produce.requests import Request
from metaq.clock import SystemClock
from metaq.errors import MetaqError, ServerError
from metaq.model import MessageId, Offset
from tests.client.producing import at
from tests.rigs.virtual_time import run_virtually


def test_a_batch_is_resolved_in_order_with_its_last_request() -> None:
    """Outcomes come in any order; both are counted."""

    async def main() -> None:
        buffer = Buffer[Any](
            ProducerOptions(), SystemClock(), asyncio.get_running_loop(), print
        )
        ends: list[MetaqError] = []
        outcomes = SendOutcomes(buffer, AttemptLimits(1.0, 0), ends.append)
        with buffer.lock:
            batch = buffer.begin(None, 10.0)
            batch.add([b"a", b"bc"], None, [0, 21, 43])
        batch.requests_left = 2
        first, second = (
            Request(batch, BatchSpan(n, n + 1, is_mput=True), at(0), n) for n in (0, 1)
        )
        result, error = SendResult(MessageId(1), at(0), Offset(7)), ServerError("no")
        outcomes.fail(second, error)
        assert (outcomes.failure, outcomes.is_over, ends) == (error, True, [error])
        assert not batch.is_done
        outcomes.succeed(first, [BatchOutcome(0, result)])
        assert batch.outcomes == [BatchOutcome(0, result), BatchOutcome(1, error)]
        seen = outcomes.snapshot(0)
        assert (seen.acknowledged_count, seen.acknowledged_bytes) == (1, 1)
        assert seen.failed == {"ServerError": 1}

    run_virtually(main())
