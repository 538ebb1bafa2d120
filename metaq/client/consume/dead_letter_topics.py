"""Topics of dead letters are looked for when a `run` begins, not when one is needed.

A topic that is missing holds up its partition at the first message that is given up,
perhaps days later.
"""

import logging
from collections.abc import Iterable

from metaq.client.cluster.catalog import read_cluster
from metaq.client.cluster.context import ClientContext
from metaq.client.cluster.presence import missing_topics
from metaq.client.consume.redelivery import RetryPolicy, dead_letter_topic
from metaq.client.errors import NoTopicError
from metaq.config.topic_rules import is_safe_topic
from metaq.errors import ConfigError, CoordinationError, NoBrokerError

_log = logging.getLogger(__name__)


async def require_letter_topics(
    context: ClientContext,
    policy: RetryPolicy,
    topics: Iterable[str],
    timeout: float | None,
) -> None:
    """Refuse, or make, topics of dead letters that do not exist.

    Where the cluster cannot be asked it is logged, and the run begins: what it reads
    may be there all the same.

    Args:
        context: the client's parts.
        policy: nothing is looked for where it sends no dead letters.
        topics: topics of the consumer.
        timeout: seconds; None takes `request_timeout_s`.

    Raises:
        NoTopicError: one does not exist, and the policy does not have it made.
        ConfigError: no topic can have such a name.
        MetaqError: it cannot be made, as `AsyncAdmin.create_topic` says.
    """
    if policy.then != "dead_letter":
        return
    names = sorted({dead_letter_topic(policy, topic) for topic in topics})
    for name in names:
        if not is_safe_topic(name):
            raise ConfigError(f"dead letters: no topic can have the name {name!r}")
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
        if not policy.create_dead_letter_topic:
            raise NoTopicError(
                f"dead-letter topic '{name}' does not exist; metaq topics create"
                f" {name} --partitions 1"
            )
        assert context.make_topic is not None
        await context.make_topic(name, timeout)
