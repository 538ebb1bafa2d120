"""The client library: publish to and consume from MetaQ brokers, sync and async.

The names are those of `public.py`, which is imported when one of them is asked for: a
module of this package is had without the rest of it.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from metaq.client.public import *  # noqa: F403  # the list stands there


def __getattr__(name: str) -> Any:
    """Return a public name."""
    import metaq.client.public as public  # noqa: PLC0415  # all of the package

    return getattr(public, name)


def __dir__() -> list[str]:
    """Return the public names."""
    return list(__getattr__("__all__"))
