"""API keys, principals, the ledger, settings and dead letters. No I/O.

Cores are whole cores, not hundredths.
"""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any, Final, Literal
from uuid import UUID

import msgspec

from rota.model.access import GrantSpec
from rota.model.identity.api_key_format import KeyId
from rota.model.identity.principals import PrincipalKind
from rota.model.jobs.submission import ResubmitResult

DEAD_LETTERS_MAX: Final = 10_000
"""Dead letters per request."""
NO_NUL: Final = r"^[^\x00]*$"
"""PostgreSQL text cannot contain NUL."""
_DeadLetterId = Annotated[int, msgspec.Meta(ge=1, le=2**63 - 1)]
KeyState = Literal["active", "expired", "revoked", "disabled"]
"""`disabled`: its principal is."""
DeadLetterKind = Literal["frame", "job", "message", "output", "saga"]


class ResourceAmount(msgspec.Struct, frozen=True):
    cores: float
    gpus: int


class LedgerLineView(msgspec.Struct, frozen=True, kw_only=True):
    """One counter, in each place where it is stored."""

    level: str
    id: UUID
    name: str
    procs: ResourceAmount
    """Sum of the procs: authoritative."""
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
    """Redis keys with contents that no script writes."""


class KeyView(msgspec.Struct, frozen=True, kw_only=True):
    id: KeyId
    name: str
    principal: str
    """Whom it belongs to."""
    state: KeyState
    grants: list[GrantSpec]
    created_at: datetime
    expires_at: datetime | None = None
    last_used_at: datetime | None = None
    """Accurate to about a minute."""
    revoked_at: datetime | None = None


class KeySpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    name: str
    grants: tuple[GrantSpec, ...]
    expires_s: float | None = None
    principal: str = ""
    """An existing principal to whom it belongs: that of the calling key or, for admins of every show, any. Empty: a new
    principal with the name of the key."""
    kind: PrincipalKind = PrincipalKind.SERVICE
    """Of a new principal."""


class CreatedKey(msgspec.Struct, frozen=True):
    """`text` is the key itself; it is returned only once."""

    key: KeyView
    text: str

    def __repr__(self) -> str:
        return f"CreatedKey({self.key.id})"

    def __rich_repr__(self) -> list[tuple[str, str]]:
        return [("id", self.key.id)]


class CallerView(msgspec.Struct, frozen=True, kw_only=True):
    """The calling key, its principal and its grants."""

    key: KeyId
    name: str
    principal: str
    grants: list[GrantSpec]


class SettingView(msgspec.Struct, frozen=True, kw_only=True):
    path: str
    value: Any
    unit: str | None = None


class DeadLetter(msgspec.Struct, frozen=True, kw_only=True):
    """`cause` identifies the failure, such as a token, a message id, or a run and its step."""

    kind: DeadLetterKind
    reason: str
    cause: str
    queue: str | None = None
    job: UUID | None = None
    layer: UUID | None = None
    frame: int | None = None
    attempt: int | None = None
    payload: bytes | None = None
    error: str | None = None
    id: int = 0
    created_at: datetime | None = None


class PrincipalView(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    kind: PrincipalKind
    is_global: bool
    """Created by an admin of every show: `approvers` of a policy can name it."""
    keys: int
    """Keys that are not revoked."""
    created_at: datetime
    disabled_at: datetime | None = None


class PrincipalSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    name: str
    kind: PrincipalKind = PrincipalKind.PERSON


class DeadLetterSelector(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Selects dead letters that match all given fields; at least one is required."""

    ids: Annotated[tuple[_DeadLetterId, ...], msgspec.Meta(max_length=DEAD_LETTERS_MAX)] | None = None
    kind: DeadLetterKind | None = None
    reason: Annotated[str, msgspec.Meta(max_length=100, pattern=NO_NUL)] | None = None
    queue: Annotated[str, msgspec.Meta(max_length=300, pattern=NO_NUL)] | None = None
    job: UUID | None = None


class DeadLetterActionResult(msgspec.Struct, frozen=True):
    """Ids of the removed dead letters, and the jobs that retry them."""

    gone: list[int]
    jobs: list[ResubmitResult] = []
