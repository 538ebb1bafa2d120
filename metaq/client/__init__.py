"""The client library: publish to and consume from MetaQ brokers, sync and async."""

from metaq.client.batches import SendFuture, SendResult
from metaq.client.blocking import Client, Consumer
from metaq.client.blocking_producer import Producer
from metaq.client.consumer import AsyncConsumer
from metaq.client.options import ClientOptions, ConsumerOptions, ProducerOptions
from metaq.client.partitioner import KeyHash, OutgoingMessage, Pinned, RoundRobin
from metaq.client.producer import AsyncProducer
from metaq.client.session import AsyncClient

__all__ = [
    "AsyncClient",
    "AsyncConsumer",
    "AsyncProducer",
    "Client",
    "ClientOptions",
    "Consumer",
    "ConsumerOptions",
    "KeyHash",
    "OutgoingMessage",
    "Pinned",
    "Producer",
    "ProducerOptions",
    "RoundRobin",
    "SendFuture",
    "SendResult",
]
