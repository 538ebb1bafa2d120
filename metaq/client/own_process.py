"""Objects that stay in the process that made them."""

from typing import NoReturn


class OfOneProcess:
    """Base class of clients and their objects: they cannot be pickled or copied.

    Their connections, tasks and threads are those of one process.
    """

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            f"{type(self).__name__} cannot be pickled or copied, because its"
            " connections belong to one process: each process makes its own client"
        )
