"""Paths on this machine: shipped settings, data of the user."""

import os
from importlib import resources
from pathlib import Path
from typing import Final

from metaq.errors import ConfigError

SETTINGS_BYTES_MAX: Final = 1024 * 1024
"""A configuration file is some ten KiB."""


def default_data_dir() -> Path:
    """Return the default data directory of `metaq local`."""
    base = os.environ.get("XDG_DATA_HOME", "")
    # The standard has a relative path ignored.
    root = Path(base) if base.startswith("/") else Path.home() / ".local" / "share"
    return root / "metaq"


def installed_settings() -> Path:
    """Return the `server.ini` that came with the package.

    In a wheel it lies inside the package; in a checkout it is `config/server.ini`.

    Raises:
        ConfigError: neither is there.
    """
    package = Path(str(resources.files("metaq")))
    candidates = (package / "server.ini", package.parent / "config" / "server.ini")
    for path in candidates:
        if path.is_file():
            return path
    raise ConfigError(f"server.ini is missing: expected {candidates[0]}")


def read_bytes(path: str) -> bytes:
    """Return the bytes of a configuration file.

    Raises:
        ConfigError: it cannot be read.
    """
    try:
        with Path(path).open("rb") as file:
            data = file.read(SETTINGS_BYTES_MAX + 1)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from error
    if len(data) > SETTINGS_BYTES_MAX:
        raise ConfigError(
            f"{path}: expected at most {SETTINGS_BYTES_MAX} bytes, got more"
        )
    return data
