"""The client library: publish to and consume from MetaQ brokers, sync and async."""

from metaq.client.options import ClientOptions, ConsumerOptions, ProducerOptions

__all__ = ["ClientOptions", "ConsumerOptions", "ProducerOptions"]
