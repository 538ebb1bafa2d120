"""Partitions that hold less than the record of their data directory says."""

from collections.abc import Iterable, Sequence

from metaq.storage.inventory import Inventory
from metaq.storage.log_dir import LogDir
from metaq.storage.opening import (
    PartitionLoader,
    RecoveredPartition,
    extent_of,
    parse_log_directory_name,
    stop_for,
)


def stop_incomplete(
    inventory: Inventory,
    loader: PartitionLoader,
    recovered: Sequence[RecoveredPartition],
    directories: Iterable[LogDir],
) -> list[RecoveredPartition]:
    """Return the partitions of a start, with those stopped that hold less than before.

    Args:
        inventory: the records; they keep the former extents of stopped logs.
        loader: makes partitions without files.
        recovered: partitions of all directories.
        directories: the open data directories.
    """
    result = list[RecoveredPartition]()
    for directory in directories:
        path = directory.path
        here = [each for each in recovered if each.data_path == path]
        losses = inventory.find_losses(
            path, {each.log_id: extent_of(each.found.segments) for each in here}
        )
        for each in here:
            name = str(each.log_id)
            held, loss = inventory.held(path, name), losses.get(name)
            if loss is not None and not (each.found.segments or each.found.damage):
                # Nothing is left of it: as if its directory were missing, too.
                each.writer.abandon()
                continue
            losses.pop(name, None)
            if held is not None and (loss is not None or each.found.damage):
                inventory.keep(each.log_id, held)
            if loss is None or not each.found.segments:
                result.append(each)
            else:
                result.append(stop_for(each, loss))
        for name, loss in losses.items():
            log_id = parse_log_directory_name(name)
            held = inventory.held(path, name)
            if log_id is None or held is None:
                continue
            inventory.keep(log_id, held)
            result.append(
                loader.missing_partition(log_id, loss, held, directory.sync_latency)
            )
    return result
