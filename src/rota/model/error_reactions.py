"""What a caller does about an error: one classification for every service, whichever server the error came from.

`rota.infra.postgres.failures`, `rota.infra.redis.failures` and `rota.infra.nats.failures` turn the answers of servers
into Rota's errors; this module says what follows from these.

| reaction | the error | the caller |
|---|---|---|
| retry | concerns this operation only (a lock, a deadlock); nothing took effect | goes on, and repeats it later |
| back off | concerns every operation (a server is away, full or read-only) | waits, then repeats |
| refuse | lies in the input or the set-up | reports it to the caller, who can correct it |
| bug | anything else | fails visibly |

Only a bug counts as a crash of a service (`rota.infra.service.lifecycle`).
"""

from __future__ import annotations

from enum import StrEnum
from typing import Final

from rota.model.errors import InvalidInput, PostgresBusy, Refused, SetupFailed, Unavailable


class Reaction(StrEnum):
    """In order of severity: that of a group of errors is its most severe."""

    RETRY = "retry"
    BACK_OFF = "back_off"
    REFUSE = "refuse"
    BUG = "bug"


_SEVERITY: Final = tuple(Reaction)
_REACTIONS: Final[tuple[tuple[type[Exception], Reaction], ...]] = (
    (PostgresBusy, Reaction.RETRY),
    (Unavailable, Reaction.BACK_OFF),
    (InvalidInput, Reaction.REFUSE),
    (SetupFailed, Reaction.REFUSE),
    (Refused, Reaction.REFUSE),
)
"""The first that matches counts."""


def reaction_to(error: BaseException) -> Reaction:
    if isinstance(error, BaseExceptionGroup):
        return max((reaction_to(each) for each in error.exceptions), key=_SEVERITY.index)
    return next((reaction for kind, reaction in _REACTIONS if isinstance(error, kind)), Reaction.BUG)


def is_outage(error: BaseException) -> bool:
    """Whether every other operation would fail as well, so that the caller stops and waits."""
    return reaction_to(error) is Reaction.BACK_OFF


def is_transient(error: BaseException) -> bool:
    """Whether the same operation may succeed later without anybody's doing."""
    return reaction_to(error) in (Reaction.RETRY, Reaction.BACK_OFF)
