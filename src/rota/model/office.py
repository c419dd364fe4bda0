"""Keys, the ledger and dead letters as faces tell them, and what they take. No I/O.

Cores are in cores.
"""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Final, Literal
from uuid import UUID

import msgspec

from rota.model.access import GrantSpec
from rota.model.job import Reopened
from rota.model.key_text import KeyId

LETTERS_MAX: Final = 10_000
"""Dead letters that are settled at once."""
NO_NUL: Final = r"^[^\x00]*$"
"""The one character that PostgreSQL does not take."""
_LetterId = Annotated[int, msgspec.Meta(ge=1, le=2**63 - 1)]
KeyState = Literal["active", "expired", "revoked"]
LetterKind = Literal["frame", "job", "message", "output", "saga"]


class Amount(msgspec.Struct, frozen=True):
    cores: float
    gpus: int


class LineTold(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that is counted, in each of its places."""

    level: str
    id: UUID
    name: str
    procs: Amount
    """What is booked: the truth."""
    table: Amount
    redis: Amount | None
    problem: str | None = None


class LedgerTold(msgspec.Struct, frozen=True, kw_only=True):
    show: str
    ok: bool
    managed: bool
    seeded: bool | None
    lines: list[LineTold]
    damaged: list[str] = []
    """Keys in Redis that no script leaves as they are."""


class KeyTold(msgspec.Struct, frozen=True, kw_only=True):
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


class KeyMade(msgspec.Struct, frozen=True):
    """`text` is the key itself, which is shown this once."""

    key: KeyTold
    text: str

    def __repr__(self) -> str:
        return f"KeyMade({self.key.id})"

    def __rich_repr__(self) -> list[tuple[str, str]]:
        return [("id", self.key.id)]


class Letters(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which dead letters: those that agree with all that is given, which must be something."""

    ids: Annotated[tuple[_LetterId, ...], msgspec.Meta(max_length=LETTERS_MAX)] | None = None
    kind: LetterKind | None = None
    reason: Annotated[str, msgspec.Meta(max_length=100, pattern=NO_NUL)] | None = None
    queue: Annotated[str, msgspec.Meta(max_length=300, pattern=NO_NUL)] | None = None
    job: UUID | None = None


class Settled(msgspec.Struct, frozen=True):
    """Ids of the letters that are gone, and the jobs that run them again."""

    gone: list[int]
    jobs: list[Reopened] = []
