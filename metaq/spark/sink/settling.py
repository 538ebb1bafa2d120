"""The end of a write by hand: what a dead driver has left is ended as was decided."""

from collections.abc import Callable

from metaq.client.session import AsyncClient, context_of
from metaq.spark.sink.decisions import Decision
from metaq.spark.sink.exactly_once import TransactionManager


async def settle_write(
    client: AsyncClient,
    name: str,
    *,
    is_batch_write: bool,
    draw_turn: Callable[[], str],
) -> Decision | None:
    """Commit what was decided at all brokers, and roll back the rest.

    Args:
        client: started.
        name: of the write's nodes, and its qualifier at brokers.
        is_batch_write: no later batch needs its decision, which is forgotten.
        draw_turn: returns a text that it never returned before.

    Returns:
        What was decided; None for nothing.
    """
    context = context_of(client)
    manager = TransactionManager(
        context, context.deadline_s(), name=name, place="", draw_turn=draw_turn
    )
    decision = await manager.settle()
    if is_batch_write and decision is not None:
        await manager.forget()
    return decision
