"""The client library: publish to and consume from MetaQ brokers, sync and async."""

from metaq.client.blocking import Client, Consumer
from metaq.client.consumer import AsyncConsumer
from metaq.client.options import ClientOptions, ConsumerOptions, ProducerOptions
from metaq.client.session import AsyncClient

__all__ = [
    "AsyncClient",
    "AsyncConsumer",
    "Client",
    "ClientOptions",
    "Consumer",
    "ConsumerOptions",
    "ProducerOptions",
]
