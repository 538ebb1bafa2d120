"""The client library: publish to and consume from MetaQ brokers, sync and async."""

from metaq.client.admin import BrokerDescription
from metaq.client.administration import AsyncAdmin
from metaq.client.batches import SendFuture, SendResult
from metaq.client.blocking import Client, Consumer
from metaq.client.blocking_administration import Admin
from metaq.client.blocking_producer import OrderedProducer, Producer
from metaq.client.browse import GetResult
from metaq.client.client_statistics import ClientStatistics
from metaq.client.consumer import AsyncConsumer
from metaq.client.dead_letters import Origin, read_origin
from metaq.client.duplicate_ids import DuplicateIds, LruDuplicateIds
from metaq.client.errors import (
    BrokerRegisteredError,
    BufferFullError,
    CannotAnswerError,
    GivenUpError,
    GroupInUseError,
    HandlerFailedError,
    MessageTooLargeError,
    NoProgressError,
    NoTopicError,
    NotSettledError,
    OffsetStoreError,
    OutcomeUnknownError,
    PartitionsAwayError,
    PartlySentError,
    StuckError,
    TopicExistsError,
    TopicRefusedError,
)
from metaq.client.file_offsets import FileOffsets
from metaq.client.offset_store import MemoryOffsets, OffsetStore
from metaq.client.options import ClientOptions, ConsumerOptions, ProducerOptions, Start
from metaq.client.ordered import AsyncOrderedProducer, OrderedStatistics, Spooled
from metaq.client.partitioner import (
    KeyHash,
    OutgoingMessage,
    Pinned,
    RoundRobin,
    Selector,
)
from metaq.client.producer import AsyncProducer, ProducerStatistics
from metaq.client.progress import ConsumerState, ConsumerStatistics, Health, Lag
from metaq.client.redelivery import Reject, RetryPolicy
from metaq.client.session import AsyncClient
from metaq.client.topic_admin import TopicDescription, TopicOnBroker
from metaq.errors import (
    BadReplyError,
    ClientError,
    ClosedError,
    ConfigError,
    ConnectionLostError,
    CoordinationError,
    CorruptRecordError,
    ForbiddenError,
    LocalProtocolError,
    LogDirLockedError,
    MetaqError,
    NoBrokerError,
    NoDataError,
    NoResourcesError,
    NoRoomError,
    NoSpaceError,
    NotSentError,
    OwnershipLostError,
    RemoteProtocolError,
    RequestTimeoutError,
    ServerError,
    StorageError,
    UnavailableError,
    UnexpectedReplyError,
)
from metaq.model import Message, MessageId, Offset, TopicPartition
from metaq.zk.definitions import Effect, TopicDefinition, TopicState
from metaq.zk.errors import MemberTakenError

__all__ = [
    "Admin",
    "AsyncAdmin",
    "AsyncClient",
    "AsyncConsumer",
    "AsyncOrderedProducer",
    "AsyncProducer",
    "BadReplyError",
    "BrokerDescription",
    "BrokerRegisteredError",
    "BufferFullError",
    "CannotAnswerError",
    "Client",
    "ClientError",
    "ClientOptions",
    "ClientStatistics",
    "ClosedError",
    "ConfigError",
    "ConnectionLostError",
    "Consumer",
    "ConsumerOptions",
    "ConsumerState",
    "ConsumerStatistics",
    "CoordinationError",
    "CorruptRecordError",
    "DuplicateIds",
    "Effect",
    "FileOffsets",
    "ForbiddenError",
    "GetResult",
    "GivenUpError",
    "GroupInUseError",
    "HandlerFailedError",
    "Health",
    "KeyHash",
    "Lag",
    "LocalProtocolError",
    "LogDirLockedError",
    "LruDuplicateIds",
    "MemberTakenError",
    "MemoryOffsets",
    "Message",
    "MessageId",
    "MessageTooLargeError",
    "MetaqError",
    "NoBrokerError",
    "NoDataError",
    "NoProgressError",
    "NoResourcesError",
    "NoRoomError",
    "NoSpaceError",
    "NoTopicError",
    "NotSentError",
    "NotSettledError",
    "Offset",
    "OffsetStore",
    "OffsetStoreError",
    "OrderedProducer",
    "OrderedStatistics",
    "Origin",
    "OutcomeUnknownError",
    "OutgoingMessage",
    "OwnershipLostError",
    "PartitionsAwayError",
    "PartlySentError",
    "Pinned",
    "Producer",
    "ProducerOptions",
    "ProducerStatistics",
    "Reject",
    "RemoteProtocolError",
    "RequestTimeoutError",
    "RetryPolicy",
    "RoundRobin",
    "Selector",
    "SendFuture",
    "SendResult",
    "ServerError",
    "Spooled",
    "Start",
    "StorageError",
    "StuckError",
    "TopicDefinition",
    "TopicDescription",
    "TopicExistsError",
    "TopicOnBroker",
    "TopicPartition",
    "TopicRefusedError",
    "TopicState",
    "UnavailableError",
    "UnexpectedReplyError",
    "read_origin",
]
