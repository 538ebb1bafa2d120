"""The client library: publish to and consume from MetaQ brokers, sync and async."""

from metaq.client.batches import SendFuture, SendResult
from metaq.client.blocking import Client, Consumer
from metaq.client.blocking_producer import OrderedProducer, Producer
from metaq.client.browse import GetResult
from metaq.client.consumer import AsyncConsumer
from metaq.client.dead_letters import Origin, read_origin
from metaq.client.errors import HandlerFailedError
from metaq.client.file_offsets import FileOffsets
from metaq.client.offset_store import MemoryOffsets
from metaq.client.options import ClientOptions, ConsumerOptions, ProducerOptions
from metaq.client.ordered import AsyncOrderedProducer, Spooled
from metaq.client.partitioner import KeyHash, OutgoingMessage, Pinned, RoundRobin
from metaq.client.producer import AsyncProducer
from metaq.client.redelivery import Reject, RetryPolicy
from metaq.client.session import AsyncClient

__all__ = [
    "AsyncClient",
    "AsyncConsumer",
    "AsyncOrderedProducer",
    "AsyncProducer",
    "Client",
    "ClientOptions",
    "Consumer",
    "ConsumerOptions",
    "FileOffsets",
    "GetResult",
    "HandlerFailedError",
    "KeyHash",
    "MemoryOffsets",
    "OrderedProducer",
    "Origin",
    "OutgoingMessage",
    "Pinned",
    "Producer",
    "ProducerOptions",
    "Reject",
    "RetryPolicy",
    "RoundRobin",
    "SendFuture",
    "SendResult",
    "Spooled",
    "read_origin",
]
