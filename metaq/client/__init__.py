"""The client library: publish to and consume from MetaQ brokers, sync and async.

The names are those of `public.py`, which is imported when one of them is used: a module
of this package can be imported without the rest of it.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from metaq.client.public import *  # noqa: F403  # the list is there
else:  # a checker of types would take any name, for the first function gives all

    def __getattr__(name: str) -> Any:
        """Return a public name."""
        import metaq.client.public as public  # noqa: PLC0415  # all of the package

        if name == "__all__":
            return sorted(each for each in vars(public) if not each.startswith("_"))
        return getattr(public, name)

    def __dir__() -> list[str]:
        """Return the public names."""
        return list(__getattr__("__all__"))
