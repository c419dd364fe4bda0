"""Maps failures of nats-py to Rota's errors.

| failure | error | reaction (`rota.model.error_reactions`) |
|---|---|---|
| not connected, no answer in time, no responders, a full send buffer | `NatsUnavailable` | back off |
| JetStream cannot do it now: starting, without leader, offline, full, a limit reached | `NatsUnavailable` | back off |
| JetStream is off at the start, or refuses a stream or consumer as it is declared | `SetupFailed` | refuse |
| the message is larger than the server accepts | `TooLarge` | refuse |
| an invalid subject, header or callback | nats-py's own | a bug |

A slow consumer loses messages and raises nothing: `NatsConnection` counts them, and readers find the gap.
"""

from __future__ import annotations

from typing import Final

import msgspec
from nats import errors

from rota.model.errors import NatsUnavailable, RotaError, SetupFailed, TooLarge

BUGS: Final = (errors.BadSubjectError, errors.BadHeaderError, errors.InvalidCallbackTypeError, errors.BadTimeoutError)

TOO_MANY_REQUESTS: Final = 429
SERVER_ERRORS: Final = 500
"""Codes from here on lie with the server, except `SETUP_ERRORS`."""
SUBJECTS_OVERLAP: Final = 10065
SETUP_ERRORS: Final = frozenset((10006, 10010, 10036, 10052, 10074))
"""Not clustered, clustering required, not supported in a cluster, invalid configuration, more replicas than servers."""
PASSING_ERRORS: Final = frozenset((10002, 10005, 10026))
"""Limits that others may free: resources of the account, peers for a replica, consumers."""


class ApiError(msgspec.Struct, frozen=True):
    """An error that the JetStream API answered: `code` as in HTTP, `err_code` one of NATS's own."""

    code: int
    err_code: int = 0
    description: str = ""

    @property
    def passes(self) -> bool:
        """Whether the same call may succeed later without anybody's doing."""
        if self.err_code in SETUP_ERRORS:
            return False
        return self.code >= SERVER_ERRORS or self.code == TOO_MANY_REQUESTS or self.err_code in PASSING_ERRORS


def on_api_error(error: ApiError, what: str, address: str) -> SetupFailed | NatsUnavailable:
    """The error to raise for an answer of the JetStream API; `what` is what could not be done."""
    facts = {"address": address, "err_code": error.err_code}
    message = f"NATS at {address} reports that {what}: {error.description or error.code}."
    if error.err_code == SUBJECTS_OVERLAP:
        return SetupFailed(f"{message} Two streams cannot share a subject: set another NATS prefix.", **facts)
    if error.passes:
        return NatsUnavailable(f"{message} Try again when the server has recovered.", **facts)
    return SetupFailed(f"{message} Correct the setting it names, or the server's limits.", **facts)


def to_rota_error(error: Exception, what: str, address: str) -> RotaError | None:
    """The error to raise instead of nats-py's; `what` is what NATS does not do. None: a bug, raised as it is."""
    if isinstance(error, BUGS):
        return None
    if isinstance(error, errors.MaxPayloadError):
        return TooLarge(
            f"A message is larger than NATS at {address} accepts: raise its max_payload, or send less.", address=address
        )
    if isinstance(error, errors.NoRespondersError):
        what = "has no responder; is JetStream enabled?"
    return unavailable(what, error, address)


def unavailable(what: str, error: Exception | None, address: str) -> NatsUnavailable:
    reason = f" ({cause(error)})" if error is not None else ""
    return NatsUnavailable(
        f"NATS at {address} {what}{reason}: check that it runs and that the NATS URL is right.", address=address
    )


def cause(error: Exception) -> str:
    """A short reason without addresses or credentials."""
    if isinstance(error, TimeoutError):
        return "no answer in time"
    if isinstance(error, OSError):
        return type(error).__name__
    return str(error).removeprefix("nats: ")
