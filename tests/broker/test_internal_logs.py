"""Logs of the broker's own: read in windows, appended to, in order."""

import asyncio
from pathlib import Path

from metaq.broker.internal_logs import InternalLogs, read_range, read_records
from metaq.errors import MetaqError
from metaq.model import LogId, Offset
from tests.rigs.broker import running_broker
from tests.rigs.waiting import until

LOG = LogId("__delays", 0)


def test_records_are_read_from_any_of_them_on_in_windows(tmp_path: Path) -> None:
    """Also one that is larger than the window."""

    async def main() -> None:
        async with running_broker(tmp_path) as broker:
            logs, outcomes = InternalLogs(broker.context), list[MetaqError | None]()
            assert logs.find(LOG) is None
            payloads = [b"%d" % n * size for n, size in enumerate((1, 500, 3, 100))]
            for payload in payloads:
                logs.append(LOG, payload, outcomes.append)
            await until(lambda: len(outcomes) == len(payloads))
            assert outcomes == [None] * len(payloads)
            log = logs.find(LOG)
            assert log is not None
            found = [each async for each in read_records(log, window_bytes=64)]
            assert [record.payload for _offset, record in found] == payloads
            second = found[1][0]
            rest = [each async for each in read_records(log, second)]
            assert rest == found[1:]
            end = Offset(second + found[1][1].size_bytes)
            assert (await read_range(log, second, end))[20:] == payloads[1]

    asyncio.run(main())


def test_an_append_that_is_refused_is_reported(tmp_path: Path) -> None:
    """The log is closed."""

    async def main() -> None:
        async with running_broker(tmp_path) as broker:
            context = broker.context
        outcomes = list[MetaqError | None]()
        InternalLogs(context).append(LOG, b"late", outcomes.append)
        assert len(outcomes) == 1
        assert outcomes[0] is not None

    asyncio.run(main())
