"""Exceptions a task raises to decide how its attempt ends. Any other exception is a failure that is retried."""

from __future__ import annotations


class Fatal(Exception):
    """Fails the frame without retries."""


class Retry(Exception):
    """Retries the frame, `after` seconds if given."""

    def __init__(self, reason: str = "", *, after: float = 0.0) -> None:
        super().__init__(reason)
        self.after = after


class Cancelled(BaseException):
    """Raised by `Context.check` after a stop request, and at any point of a stopped sync agent.

    A BaseException, like asyncio's CancelledError.
    """
