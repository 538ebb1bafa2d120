"""The client library: publish to and consume from MetaQ brokers, sync and async."""

from metaq.client.admin.async_admin import AsyncAdmin
from metaq.client.admin.cluster_admin import BrokerDescription
from metaq.client.admin.topic_admin import (
    TopicDescription,
    TopicOnBroker,
)
from metaq.client.client_statistics import ClientStatistics
from metaq.client.consume.browse import GetResult
from metaq.client.consume.consumer import AsyncConsumer
from metaq.client.consume.dead_letters import Origin, read_origin
from metaq.client.consume.progress import (
    ConsumerState,
    ConsumerStatistics,
    Health,
    Lag,
)
from metaq.client.consume.redelivery import Reject, RetryPolicy
from metaq.client.duplicate_ids import DuplicateIds, LruDuplicateIds
from metaq.client.errors import (
    BrokerRegisteredError,
    BufferFullError,
    CannotAnswerError,
    GivenUpError,
    GroupInUseError,
    HandlerFailedError,
    HeuristicError,
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
    TransactionInDoubtError,
    TransactionRolledBackError,
    UnknownXidError,
    XaError,
    XaProtocolError,
    XaRolledBackError,
)
from metaq.client.offsets.file_offsets import FileOffsets
from metaq.client.offsets.offset_store import MemoryOffsets, OffsetStore
from metaq.client.options import ClientOptions, ConsumerOptions, ProducerOptions, Start
from metaq.client.partitioner import (
    KeyHash,
    OutgoingMessage,
    Pinned,
    RoundRobin,
    Selector,
)
from metaq.client.produce.batches import SendFuture, SendResult
from metaq.client.produce.ordered_producer import (
    AsyncOrderedProducer,
    OrderedStatistics,
    Spooled,
)
from metaq.client.produce.producer import (
    AsyncProducer,
)
from metaq.client.produce.producer_counters import ProducerStatistics
from metaq.client.produce.transaction import AsyncTransaction, TransactionState
from metaq.client.produce.transaction_branch import PendingResult
from metaq.client.produce.xa import AsyncXa
from metaq.client.session import AsyncClient
from metaq.client.sync.admin import Admin
from metaq.client.sync.client import Client, Consumer
from metaq.client.sync.producers import OrderedProducer, Producer
from metaq.client.sync.transactions import Transaction, Xa
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
    TransactionError,
    UnavailableError,
    UnexpectedReplyError,
)
from metaq.model import Message, MessageId, Offset, TopicPartition, XaTransactionId
from metaq.zk.definitions import Effect, TopicDefinition, TopicState
from metaq.zk.errors import MemberTakenError

__all__ = [
    "Admin",
    "AsyncAdmin",
    "AsyncClient",
    "AsyncConsumer",
    "AsyncOrderedProducer",
    "AsyncProducer",
    "AsyncTransaction",
    "AsyncXa",
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
    "HeuristicError",
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
    "PendingResult",
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
    "Transaction",
    "TransactionError",
    "TransactionInDoubtError",
    "TransactionRolledBackError",
    "TransactionState",
    "UnavailableError",
    "UnexpectedReplyError",
    "UnknownXidError",
    "Xa",
    "XaError",
    "XaProtocolError",
    "XaRolledBackError",
    "XaTransactionId",
    "read_origin",
]
