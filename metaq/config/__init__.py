"""`server.ini` in MetaQ's format → frozen settings, with every bound named."""

from metaq.config.load import (
    NO_OVERRIDES,
    Reload,
    TopicsDiff,
    define_topic,
    diff_topics,
    load_config,
    parse_config,
    parse_delete_policy,
    reload_config,
)
from metaq.config.settings import (
    BrokerConfig,
    DeleteKind,
    DeletePolicy,
    LimitsConfig,
    SystemConfig,
    TopicConfig,
    ZooKeeperConfig,
    default_topic,
)
from metaq.config.topic_rules import TopicRules, is_pattern, is_safe_topic

__all__ = [
    "NO_OVERRIDES",
    "BrokerConfig",
    "DeleteKind",
    "DeletePolicy",
    "LimitsConfig",
    "Reload",
    "SystemConfig",
    "TopicConfig",
    "TopicRules",
    "TopicsDiff",
    "ZooKeeperConfig",
    "default_topic",
    "define_topic",
    "diff_topics",
    "is_pattern",
    "is_safe_topic",
    "load_config",
    "parse_config",
    "parse_delete_policy",
    "reload_config",
]
