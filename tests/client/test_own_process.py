"""A client and its objects, given to another process."""

import copy
import pickle
from typing import Any

import pytest

from metaq.client import (
    Admin,
    AsyncAdmin,
    AsyncClient,
    AsyncConsumer,
    AsyncExactlyOnce,
    AsyncExchange,
    AsyncOrderedProducer,
    AsyncProducer,
    AsyncQueue,
    AsyncResponder,
    AsyncTransaction,
    AsyncXa,
    Client,
    Consumer,
    ExactlyOnce,
    Exchange,
    OrderedProducer,
    Producer,
    Queue,
    Responder,
    Transaction,
    Xa,
)

KINDS: list[type[Any]] = [
    *(Admin, Client, Consumer, ExactlyOnce, Exchange, OrderedProducer, Producer),
    *(Queue, Responder, Transaction, Xa),
    *(AsyncAdmin, AsyncClient, AsyncConsumer, AsyncExactlyOnce, AsyncExchange),
    *(AsyncOrderedProducer, AsyncProducer, AsyncQueue, AsyncResponder),
    *(AsyncTransaction, AsyncXa),
]


@pytest.mark.parametrize("kind", KINDS)
def test_an_object_of_a_client_stays_in_its_process(kind: type[Any]) -> None:
    """`multiprocessing` pickles with the method `spawn`, as jobs of Spark do."""
    one = object.__new__(kind)
    for call in (pickle.dumps, copy.copy, copy.deepcopy):
        with pytest.raises(TypeError) as refused:
            call(one)
        assert str(refused.value) == (
            f"{kind.__name__} cannot be pickled or copied, because its connections"
            " belong to one process: each process makes its own client"
        )


@pytest.mark.parametrize("kind", [Client, AsyncClient])
def test_so_does_what_refers_to_a_client(kind: type[Any]) -> None:
    """A method of it, as the target or an argument of a process."""
    client = kind("127.0.0.1:2181")
    with pytest.raises(TypeError, match="each process makes its own client"):
        pickle.dumps([client.producer])
