"""Keys, the ledger and dead letters as faces tell them, and what they take. No I/O.

Cores are in cores.
"""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Final, Literal
from uuid import UUID

import msgspec

from rota.model.access import GrantSpec
from rota.model.api_key_format import KeyId
from rota.model.jobs.submission import ResubmitResult

DEAD_LETTERS_MAX: Final = 10_000
"""Dead letters that are settled at once."""
NO_NUL: Final = r"^[^\x00]*$"
"""The one character that PostgreSQL does not take."""
_DeadLetterId = Annotated[int, msgspec.Meta(ge=1, le=2**63 - 1)]
KeyState = Literal["active", "expired", "revoked"]
DeadLetterKind = Literal["frame", "job", "message", "output", "saga"]


class ResourceAmount(msgspec.Struct, frozen=True):
    cores: float
    gpus: int


class LedgerLineView(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that is counted, in each of its places."""

    level: str
    id: UUID
    name: str
    procs: ResourceAmount
    """What is booked: the truth."""
    table: ResourceAmount
    redis: ResourceAmount | None
    problem: str | None = None


class LedgerView(msgspec.Struct, frozen=True, kw_only=True):
    show: str
    ok: bool
    managed: bool
    seeded: bool | None
    lines: list[LedgerLineView]
    damaged: list[str] = []
    """Keys in Redis that no script leaves as they are."""


class KeyView(msgspec.Struct, frozen=True, kw_only=True):
    id: KeyId
    name: str
    state: KeyState
    grants: list[GrantSpec]
    created_at: datetime
    expires_at: datetime | None = None
    last_used_at: datetime | None = None
    """To about a minute."""
    revoked_at: datetime | None = None


class KeySpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    name: str
    grants: tuple[GrantSpec, ...]
    expires_s: float | None = None


class CreatedKey(msgspec.Struct, frozen=True):
    """`text` is the key itself, which is shown this once."""

    key: KeyView
    text: str

    def __repr__(self) -> str:
        return f"KeyMade({self.key.id})"

    def __rich_repr__(self) -> list[tuple[str, str]]:
        return [("id", self.key.id)]


class DeadLetterSelector(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which dead letters: those that agree with all that is given, which must be something."""

    ids: Annotated[tuple[_DeadLetterId, ...], msgspec.Meta(max_length=DEAD_LETTERS_MAX)] | None = None
    kind: DeadLetterKind | None = None
    reason: Annotated[str, msgspec.Meta(max_length=100, pattern=NO_NUL)] | None = None
    queue: Annotated[str, msgspec.Meta(max_length=300, pattern=NO_NUL)] | None = None
    job: UUID | None = None


class DeadLetterActionResult(msgspec.Struct, frozen=True):
    """Ids of the letters that are gone, and the jobs that run them again."""

    gone: list[int]
    jobs: list[ResubmitResult] = []
