"""Maps failures of nats-py to Rota's errors.

| failure | error | reaction (`rota.model.error_reactions`) |
|---|---|---|
| not connected, no answer in time, no responders, a full send buffer | `NatsUnavailable` | back off |
| JetStream is off, or refuses a stream or consumer | `SetupFailed` (in `jetstream`) | refuse |
| the message is larger than the server accepts | `TooLarge` | refuse |
| an invalid subject, header or callback | nats-py's own | a bug |

A slow consumer loses messages and raises nothing: `NatsConnection` counts them, and readers find the gap.
"""

from __future__ import annotations

from typing import Final

from nats import errors

from rota.model.errors import NatsUnavailable, RotaError, TooLarge

BUGS: Final = (errors.BadSubjectError, errors.BadHeaderError, errors.InvalidCallbackTypeError, errors.BadTimeoutError)


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
