"""Policy for failing handlers: attempts, action after the last one, and logging.

A message is handled when its handler returns. If the handler raises, it gets the same
message again after a pause, up to a number of attempts, or none after `Reject`. The
policy says what happens to a message that is given up. These decisions are pure
functions.

The first failure of each kind is logged with its traceback; a kind is the type of the
error and the line that raised it. Repetitions are counted (`failure_count`) and logged
at DEBUG, so that a handler which fails for every message does not flood the log.

Source: docs/metaq-1.4/client.md 11.3 and 12.
"""

import logging
import os
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal, TypeAlias

from metaq.client.names import DEAD_LETTER_SUFFIX, check_topic
from metaq.client.options import check_order, check_types, names_fields
from metaq.client.validation import wrong_type
from metaq.errors import ConfigError
from metaq.retry import Backoff

LastResort: TypeAlias = Literal["stop", "dead_letter", "park", "drop"]
"""Action for a message that is given up."""

_NEEDED_BY: Final = {
    "dead_letter_topic": "dead_letter",
    "create_dead_letter_topic": "dead_letter",
    "park_dir": "park",
}
"""Field of a policy → the last resort that uses it."""

KINDS_MAX: Final = 100
"""Maximum number of kinds remembered, because generated code may raise at any number of
lines; further kinds are logged as repetitions."""


class Reject(Exception):  # noqa: N818  # an order of the handler, not an error
    """Raised by a handler to give its message up now, without further attempts."""


@names_fields
@dataclass(frozen=True, slots=True, kw_only=True)
class RetryPolicy:
    """Policy for failing handlers."""

    attempts_max: int = 6
    """Maximum number of attempts for one message, 1 or more; 6 is MetaQ's number.
    Another member that gets the partition, or a new process, starts a new count."""
    first_s: float = 0.5
    """Maximum pause before the second attempt; doubles with each further one. During it
    only the partition of the message waits."""
    max_s: float = 30.0
    """Maximum pause between attempts."""
    then: LastResort = "stop"
    """A message that is given up ends `run` with `HandlerFailedError` ("stop"), is sent
    to another topic ("dead_letter"), is kept in the local retry store ("park"), or is
    logged and counts as handled ("drop")."""
    dead_letter_topic: str | None = None
    """Topic of dead letters; None: the message's topic with the suffix `.dead`. It must
    exist when `run` begins. Until a broker accepts a dead letter, the partition of its
    message waits, and `health` reports it."""
    create_dead_letter_topic: bool = False
    """Whether `run` creates a missing topic of dead letters, with one partition on each
    broker. If False, `run` refuses to begin without it."""
    park_dir: Path | str | None = None
    """With "park": directory of the local retry store; one process at a time."""
    replay_first_s: float = 5.0
    """With "park": time until the first round."""
    replay_interval_s: float = 300.0
    """With "park": pause between rounds. In each round the handler gets every message
    of the store once, in no defined order to other messages."""

    def __post_init__(self) -> None:
        """Check the fields.

        Raises:
            TypeError: a value is of another type.
            ConfigError: a number is out of range, a topic name is invalid, `park_dir`
                is missing, or a topic or directory is given that `then` does not use.
        """
        check_types(self, zero=("replay_first_s",))
        check_order(self, "first_s", "max_s")
        if self.dead_letter_topic is not None:
            check_topic(self.dead_letter_topic, "dead_letter_topic")
        if not isinstance(self.park_dir, str | os.PathLike | None):
            raise wrong_type("park_dir", "str or Path", self.park_dir)
        if self.then == "park" and self.park_dir is None:
            raise ConfigError("then='park' needs a park_dir")
        for name, then in _NEEDED_BY.items():
            value = getattr(self, name)
            if value not in (None, False) and self.then != then:
                # The user expects that messages are stored there; none would be.
                raise ConfigError(
                    f"{name}: expected then={then!r} with it, got {value!r} and"
                    f" then={self.then!r}"
                )


DEFAULT_POLICY: Final = RetryPolicy()
"""Six attempts, then `run` ends, so that no message is lost and failures are seen."""


def next_delay_s(
    policy: RetryPolicy, attempts: int, error: BaseException
) -> float | None:
    """Return the pause after 1 or more attempts; None: the message is given up."""
    if isinstance(error, Reject) or attempts >= policy.attempts_max:
        return None
    return Backoff(first_s=policy.first_s, max_s=policy.max_s).delay_s(attempts)


def dead_letter_topic(policy: RetryPolicy, topic: str) -> str:
    """Return the topic that dead letters of `topic` go to."""
    return policy.dead_letter_topic or topic + DEAD_LETTER_SUFFIX


class FailureLog:
    """Log of the failures of one `run`. Owned by its handling; on the loop."""

    def __init__(self, logger: logging.Logger) -> None:
        self._logger = logger
        self._kinds: set[tuple[type[BaseException], str, int]] = set()

    def write(self, text: str, error: BaseException, *, is_last: bool) -> None:
        """Log a failure, with the traceback if it is the first of its kind.

        A first one, or that of a message that is given up (`is_last`), is logged at
        WARNING, others at DEBUG.
        """
        kind = _kind_of(error)
        is_new = kind not in self._kinds and len(self._kinds) < KINDS_MAX
        if is_new:
            self._kinds.add(kind)
        level = logging.WARNING if is_new or is_last else logging.DEBUG
        self._logger.log(level, "%s", text, exc_info=error if is_new else None)


def _kind_of(error: BaseException) -> tuple[type[BaseException], str, int]:
    """Return the type of an error, and the file and line that raised it."""
    frames = traceback.extract_tb(error.__traceback__, limit=-1)
    if not frames:
        return type(error), "", 0
    return type(error), frames[0].filename, frames[0].lineno or 0
