"""The client library: send to and read from MetaQ brokers, sync and async.

Its names are those of `public.py`, which is imported at the first use of a name, so
that a module of this package can be imported without all others.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from metaq.client.public import *  # noqa: F403  # the list is there
else:  # type checkers would accept any name because of __getattr__

    def __getattr__(name: str) -> Any:
        """Return a public name."""
        import metaq.client.public as public  # noqa: PLC0415  # all of the package

        if name == "__all__":
            return sorted(each for each in vars(public) if not each.startswith("_"))
        return getattr(public, name)

    def __dir__() -> list[str]:
        """Return the public names."""
        return list(__getattr__("__all__"))
