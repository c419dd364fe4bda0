"""What a task raises to say how its attempt ended. Any other exception is a failure that its retries may mend."""

from __future__ import annotations


class Fatal(Exception):
    """Never again: no retry can mend this."""


class Retry(Exception):
    """Not now: try again, `after` so many seconds when that is given."""

    def __init__(self, reason: str = "", *, after: float = 0.0) -> None:
        super().__init__(reason)
        self.after = after


class Cancelled(BaseException):
    """Raised by `Context.check` in a frame that was asked to stop, and in a sync agent wherever it is.

    Like the cancellation of asyncio, no `Exception`.
    """
