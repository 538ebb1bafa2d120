"""Failing handlers: attempts for a message, what happens after the last, and the log.

A handler that returns has handled its message. One that raises gets the same message
again after a pause, up to a bound; one that raises `Reject` does not. The policy says
what happens to a message that is given up. These decisions are pure functions of it.

The log gets the first failure of a kind with its traceback. A kind is the type of the
error and the line that raised it. Without that a handler that fails with every message
would flood the log; repetitions are counted (`failure_count`) and logged at DEBUG.

Source: docs/metaq-1.4/client.md 11.3 and 12.
"""

import logging
import os
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal, TypeAlias

from metaq.client.names import DEAD_LETTER_SUFFIX, check_topic
from metaq.client.options import check_order, check_types
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
"""Kinds that are remembered: generated code may raise at ever new lines."""


class Reject(Exception):  # noqa: N818  # an order of the handler, not an error
    """Raised by a handler: this message will never succeed, give it up now."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryPolicy:
    """Policy for failing handlers."""

    attempts_max: int = 6
    """Number of attempts for one message, 1 or more; 6 is MetaQ's number. A member that
    takes the partition over, or a new process, counts from the start."""
    first_s: float = 0.5
    """Longest pause before the second attempt; doubles from there. The partition
    waits, the others go on."""
    max_s: float = 30.0
    """Longest pause between attempts."""
    then: LastResort = "stop"
    """A message given up ends `run` with `HandlerFailedError` ("stop"), goes to another
    topic ("dead_letter"), waits in the local retry store ("park"), or counts as handled
    with a line in the log ("drop")."""
    dead_letter_topic: str | None = None
    """Topic of dead letters; None: the message's topic with the suffix `.dead`. The
    brokers must have it when `run` begins: as long as no broker accepts a dead letter,
    its partition waits, and `health` says so."""
    create_dead_letter_topic: bool = False
    """Make a topic of dead letters that does not exist when `run` begins, with one
    partition on each broker. False: `run` refuses to begin without it."""
    park_dir: Path | str | None = None
    """With "park": directory of the local retry store; one process at a time."""
    replay_first_s: float = 5.0
    """With "park": time until the first round."""
    replay_interval_s: float = 300.0
    """With "park": pause between rounds; in each the handler gets every message of the
    store once. The order between these and other messages is lost."""

    def __post_init__(self) -> None:
        """Refuse contradictions.

        Raises:
            TypeError: a value is of another type.
            ConfigError: a number is out of range, a directory is missing, or a topic or
                directory is named that `then` does not use.
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
                # Its user expects that such messages go there, and none is lost.
                raise ConfigError(
                    f"{name}: expected then={then!r} with it, got {value!r} and"
                    f" then={self.then!r}"
                )


DEFAULT_POLICY: Final = RetryPolicy()
"""Six attempts, then `run` ends: nothing is lost, and failures are visible."""


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
    """The logged failures of one `run`. Owner: its handling; on the loop."""

    def __init__(self, logger: logging.Logger) -> None:
        self._logger = logger
        self._kinds: set[tuple[type[BaseException], str, int]] = set()

    def write(self, text: str, error: BaseException, *, is_last: bool) -> None:
        """Write one line, with the traceback if it is the first of its kind.

        A message that is given up (`is_last`) is logged at WARNING.
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
