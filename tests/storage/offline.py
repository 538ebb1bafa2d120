"""Which data directories had a disk error."""

from metaq.storage.log_manager import LogManager


def offline(manager: LogManager) -> dict[str, str]:
    """Return the cause by the path of each directory that is offline."""
    return {
        str(each.path): str(each.offline_cause)
        for each in manager.directories()
        if each.offline_cause is not None
    }
