"""The public names of the client library; `metaq.client` exports them.

`as` marks a name as exported.
"""

# ruff: noqa: PLC0414  # that is what the aliases are for

from metaq.client.admin.broker_admin import BrokerDescription as BrokerDescription
from metaq.client.admin.broker_admin import PartitionDescription as PartitionDescription
from metaq.client.admin.cluster_admin import GroupDescription as GroupDescription
from metaq.client.admin.cluster_admin import OffsetChange as OffsetChange
from metaq.client.admin.cluster_admin import PartitionProgress as PartitionProgress
from metaq.client.admin.group_admin import SettledGroup as SettledGroup
from metaq.client.admin.queue_admin import QueueDescription as QueueDescription
from metaq.client.admin.queue_admin import (
    QueueGroupDescription as QueueGroupDescription,
)
from metaq.client.admin.scheduled_admin import (
    ScheduledDescription as ScheduledDescription,
)
from metaq.client.admin.topic_admin import AsyncAdmin as AsyncAdmin
from metaq.client.admin.topic_admin import TopicDescription as TopicDescription
from metaq.client.admin.topic_admin import TopicOnBroker as TopicOnBroker
from metaq.client.client_statistics import ClientStatistics as ClientStatistics
from metaq.client.cluster.scheduled import ScheduledBatch as ScheduledBatch
from metaq.client.consume.browse import GetResult as GetResult
from metaq.client.consume.consumer import AsyncConsumer as AsyncConsumer
from metaq.client.consume.consumer import AsyncMessageBatch as AsyncMessageBatch
from metaq.client.consume.dead_letters import read_origin as read_origin
from metaq.client.consume.exactly_once import AsyncExactlyOnce as AsyncExactlyOnce
from metaq.client.consume.progress import ConsumerState as ConsumerState
from metaq.client.consume.progress import ConsumerStatistics as ConsumerStatistics
from metaq.client.consume.progress import Health as Health
from metaq.client.consume.progress import Lag as Lag
from metaq.client.consume.redelivery import Reject as Reject
from metaq.client.consume.redelivery import RetryPolicy as RetryPolicy
from metaq.client.duplicate_ids import DuplicateIds as DuplicateIds
from metaq.client.duplicate_ids import LruDuplicateIds as LruDuplicateIds
from metaq.client.errors import AlreadySettledError as AlreadySettledError
from metaq.client.errors import BufferFullError as BufferFullError
from metaq.client.errors import ErrorReply as ErrorReply
from metaq.client.errors import ExchangeError as ExchangeError
from metaq.client.errors import GroupInUseError as GroupInUseError
from metaq.client.errors import HandlerFailedError as HandlerFailedError
from metaq.client.errors import HeuristicError as HeuristicError
from metaq.client.errors import LeaseLostError as LeaseLostError
from metaq.client.errors import LostBranchError as LostBranchError
from metaq.client.errors import MessageTooLargeError as MessageTooLargeError
from metaq.client.errors import NoDelayError as NoDelayError
from metaq.client.errors import NoExchangesError as NoExchangesError
from metaq.client.errors import NoMailboxError as NoMailboxError
from metaq.client.errors import NoQueuesError as NoQueuesError
from metaq.client.errors import NoTopicError as NoTopicError
from metaq.client.errors import OutcomeUnknownError as OutcomeUnknownError
from metaq.client.errors import PartitionsAwayError as PartitionsAwayError
from metaq.client.errors import PartlySentError as PartlySentError
from metaq.client.errors import QueueGroupError as QueueGroupError
from metaq.client.errors import ReplyTimeoutError as ReplyTimeoutError
from metaq.client.errors import TopicExistsError as TopicExistsError
from metaq.client.errors import TransactionInDoubtError as TransactionInDoubtError
from metaq.client.errors import TransactionRolledBackError as TransactionRolledBackError
from metaq.client.errors import UnknownXidError as UnknownXidError
from metaq.client.names import TopicPattern as TopicPattern
from metaq.client.offsets.file_offsets import FileOffsets as FileOffsets
from metaq.client.offsets.offset_store import MemoryOffsets as MemoryOffsets
from metaq.client.offsets.offset_store import OffsetStore as OffsetStore
from metaq.client.options import ClientOptions as ClientOptions
from metaq.client.options import ConsumerOptions as ConsumerOptions
from metaq.client.options import ProducerOptions as ProducerOptions
from metaq.client.options import QueueOptions as QueueOptions
from metaq.client.options import Start as Start
from metaq.client.partitioner import KeyHash as KeyHash
from metaq.client.partitioner import OutgoingMessage as OutgoingMessage
from metaq.client.partitioner import Pinned as Pinned
from metaq.client.partitioner import RoundRobin as RoundRobin
from metaq.client.partitioner import Selector as Selector
from metaq.client.produce.batches import SendFuture as SendFuture
from metaq.client.produce.batches import SendResult as SendResult
from metaq.client.produce.exchange import AsyncExchange as AsyncExchange
from metaq.client.produce.ordered_producer import (
    AsyncOrderedProducer as AsyncOrderedProducer,
)
from metaq.client.produce.ordered_producer import OrderedStatistics as OrderedStatistics
from metaq.client.produce.ordered_producer import Spooled as Spooled
from metaq.client.produce.producer import AsyncProducer as AsyncProducer
from metaq.client.produce.producer_counters import (
    ProducerStatistics as ProducerStatistics,
)
from metaq.client.produce.scheduling import Scheduled as Scheduled
from metaq.client.produce.transaction import AsyncTransaction as AsyncTransaction
from metaq.client.produce.transaction import TransactionState as TransactionState
from metaq.client.produce.transaction_branch import PendingResult as PendingResult
from metaq.client.produce.xa import AsyncXa as AsyncXa
from metaq.client.queue.queue_messages import AsyncQueueMessage as AsyncQueueMessage
from metaq.client.queue.work_queue import AsyncQueue as AsyncQueue
from metaq.client.request.responder import AsyncResponder as AsyncResponder
from metaq.client.session import AsyncClient as AsyncClient
from metaq.client.sync.client import Admin as Admin
from metaq.client.sync.client import Client as Client
from metaq.client.sync.client import Consumer as Consumer
from metaq.client.sync.client import MessageBatch as MessageBatch
from metaq.client.sync.producers import ExactlyOnce as ExactlyOnce
from metaq.client.sync.producers import Exchange as Exchange
from metaq.client.sync.producers import OrderedProducer as OrderedProducer
from metaq.client.sync.producers import Producer as Producer
from metaq.client.sync.producers import Transaction as Transaction
from metaq.client.sync.producers import Xa as Xa
from metaq.client.sync.queues import Queue as Queue
from metaq.client.sync.queues import QueueMessage as QueueMessage
from metaq.client.sync.queues import Responder as Responder
from metaq.errors import ClosedError as ClosedError
from metaq.errors import ConfigError as ConfigError
from metaq.errors import CoordinationError as CoordinationError
from metaq.errors import CorruptRecordError as CorruptRecordError
from metaq.errors import MetaqError as MetaqError
from metaq.errors import NoBrokerError as NoBrokerError
from metaq.errors import OwnershipLostError as OwnershipLostError
from metaq.errors import RequestTimeoutError as RequestTimeoutError
from metaq.errors import TransactionError as TransactionError
from metaq.errors import UnroutableError as UnroutableError
from metaq.model import GroupOffset as GroupOffset
from metaq.model import Message as Message
from metaq.model import MessageId as MessageId
from metaq.model import Offset as Offset
from metaq.model import TopicPartition as TopicPartition
from metaq.model import XaTransactionId as XaTransactionId
from metaq.record.dead_letters import Origin as Origin
from metaq.routing.match import Binding as Binding
from metaq.zk.definitions import Effect as Effect
from metaq.zk.definitions import TopicDefinition as TopicDefinition
from metaq.zk.definitions import TopicState as TopicState
from metaq.zk.exchange_definitions import ExchangeDefinition as ExchangeDefinition
from metaq.zk.group_definitions import QueueGroupDefinition as QueueGroupDefinition
