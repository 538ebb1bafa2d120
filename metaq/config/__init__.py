"""`server.ini` in MetaQ's format → frozen settings, with every bound named."""

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

__all__ = [
    "BrokerConfig",
    "DeleteKind",
    "DeletePolicy",
    "LimitsConfig",
    "SystemConfig",
    "TopicConfig",
    "ZooKeeperConfig",
    "default_topic",
]
