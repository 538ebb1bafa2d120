"""Queue groups as operators see them: lines of `stats queues`."""

import json
from typing import Final

from metaq.broker.queue_groups import QueueGroup
from metaq.broker.queue_part import ServedQueue
from metaq.model import Offset
from metaq.storage.partition_log import PartitionLog

HOLDERS_MAX: Final = 20
"""Workers that a line names, those that hold most."""


def line_of(
    group: QueueGroup, log: PartitionLog, queue: ServedQueue | None, floor: Offset
) -> str:
    """Return a line of `stats queues`, a JSON object; `metaq.client.admin` reads it.

    Args:
        group: of the queue.
        log: the partition.
        queue: None: no worker has asked for it since the broker began, so only its
            `floor` is known.
        floor: every message below it is done.
    """
    fields: dict[str, object] = {
        "group": group.name,
        "topic": log.log_id.topic,
        "partition": log.log_id.partition,
        "floor": floor,
        "scanned": floor,
        "end": log.high_watermark,
        "takers": len(group.takers),
        "held": {},
    }
    if queue is not None:
        state, holders = queue.state, queue.state.holders()
        most = sorted(holders.items(), key=lambda each: (-each[1], each[0]))
        fields |= {
            "scanned": state.scan_offset,
            "open": state.open_count,
            "ready": state.ready_count,
            "delayed": state.delayed_count,
            "done": state.done_count,
            "expired": state.expired_count,
            "letters": state.letter_count,
            "dropped": state.dropped_count,
            "lost": queue.lost_count,
            "lost_bytes": state.lost_bytes,
            "workers": len(holders),
            "held": dict(most[:HOLDERS_MAX]),
        }
    return json.dumps(fields)
