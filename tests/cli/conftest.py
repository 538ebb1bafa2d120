"""Commands that run in this process leave the loggers as they were."""

import logging
from collections.abc import Iterator

import pytest

from metaq.cli import logs


@pytest.fixture(autouse=True)
def quiet_loggers() -> Iterator[None]:
    levels = {name: logging.getLogger(name).level for name in ("", *logs.CHATTY)}
    form = logs.SHOWN.formatter
    yield
    logging.getLogger().removeHandler(logs.SHOWN)
    logs.SHOWN.setFormatter(form)
    for name, level in levels.items():
        logging.getLogger(name).setLevel(level)
