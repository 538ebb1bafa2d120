"""Topics of dead letters are looked for when a `run` begins, not when one is needed.

A topic that is missing holds up its partition at the first message that is given up,
perhaps days later. That of a topic which begins to match a pattern during a run is
made with its first dead letter, or named by `health()`: to end the run would stop the
other topics.
"""

import logging
from collections.abc import Collection, Iterable

from metaq.client.cluster.catalog import read_cluster
from metaq.client.cluster.context import ClientContext
from metaq.client.cluster.presence import missing_topics
from metaq.client.consume.redelivery import RetryPolicy, dead_letter_topic
from metaq.client.errors import NoTopicError
from metaq.client.names import check_topic, near_topics
from metaq.errors import CoordinationError, NoBrokerError

_log = logging.getLogger(__name__)


class LetterTopics:
    """The topics of dead letters of one run. Owner: the run. Concurrency: one loop."""

    def __init__(
        self, context: ClientContext, policy: RetryPolicy, topics: Collection[str]
    ) -> None:
        """Prepare.

        Args:
            context: the client's parts.
            policy: nothing is looked for where it sends no dead letters.
            topics: topics of the consumer; more may match its patterns later.
        """
        self._context = context
        self._policy = policy
        self._topics = topics
        self._found: set[str] = set()
        self._was_refused = False

    async def require(self, timeout: float | None) -> None:
        """Refuse, or make, topics of dead letters that do not exist.

        Where the cluster cannot be asked it is logged, and the run begins: what it
        reads may be there all the same.

        Args:
            timeout: seconds; None takes `request_timeout_s`.

        Raises:
            NoTopicError: one does not exist, and the policy does not have it made.
            ConfigError: no topic can have such a name.
            MetaqError: it cannot be made, as `AsyncAdmin.create_topic` says.
        """
        await self._require(self._topics, timeout)

    async def make(self, topic: str, timeout: float | None) -> None:
        """Make that of a topic which is read since the run began, if the policy does.

        After a refusal look for it at least, as it may have been deleted: the error of
        `require` says what to do, that of the broker does not.

        Raises:
            MetaqError: as `require`.
        """
        if self._policy.create_dead_letter_topic or self._was_refused:
            await self._require([topic], timeout)

    def forget(self) -> None:
        """Look again before the next dead letter: one was refused."""
        self._was_refused = True
        self._found.clear()

    def problems(self) -> list[str]:
        """Return a sentence for each that a topic lacks; without a request.

        Only a consumer with patterns reads topics that `require` has not seen, and
        knows the names that there are.
        """
        names = self._context.metadata.snapshot.names
        if names is None or self._policy.create_dead_letter_topic:
            return []
        return [_missing(name) for name in sorted(self._unseen(self._topics) - names)]

    def _unseen(self, topics: Iterable[str]) -> set[str]:
        if self._policy.then != "dead_letter":
            return set()
        return {dead_letter_topic(self._policy, topic) for topic in topics}.difference(
            self._found
        )

    async def _require(self, topics: Iterable[str], timeout: float | None) -> None:
        context, names = self._context, sorted(self._unseen(topics))
        if not names:
            return
        for name in names:
            check_topic(name, "dead-letter topic")
        try:
            deadline_s = context.deadline_s(timeout)
            snapshot = await read_cluster(context, names, deadline_s=deadline_s)
        except (CoordinationError, NoBrokerError) as error:
            _log.warning("topics of dead letters are not looked for: error=%s", error)
            return
        # A broker that has never answered may have it.
        missing = () if snapshot.silent else missing_topics(snapshot, names)
        for name in missing:
            if name in snapshot.puts:
                continue
            if not self._policy.create_dead_letter_topic:
                raise NoTopicError(_missing(name))
            assert context.make_topic is not None
            await context.make_topic(name, timeout)
        self._found.update(names)


def _missing(name: str) -> str:
    return f"dead-letter topic '{name}' does not exist; {near_topics(name, ())}"
