"""Keys as an administrator handles them: made, listed, revoked.

Each change is one transaction with its audit entry. A repeated `revoke` changes nothing; a repeated `create` makes
another key, since the secret of the first cannot be told again.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Final, Literal

import asyncpg
import msgspec

from rota.accounting.resources import unknown_name_error
from rota.infra import audit, failpoints
from rota.infra.audit import AuditEntry
from rota.infra.postgres import Database, Record, Transaction, query
from rota.model.access import Grant, GrantSpec, validate_expiry, validate_grants, validate_key_name
from rota.model.api_key_format import ENTROPY_BYTES, KeyId, PlainKey, new_key, without_secret
from rota.model.errors import InvalidInput, NotFound
from rota.model.ids import ShowId

ADD = query(__package__, "key_add")
GRANT = query(__package__, "key_grant")
SHOWS = query(__package__, "key_shows")
LIST = query(__package__, "key_list")
REVOKE = query(__package__, "key_revoke")

ApiKeyState = Literal["active", "expired", "revoked"]
PREFIX_CHARS_MIN: Final = 4


class ApiKey(msgspec.Struct, frozen=True):
    """All there is to tell about a key; `id` is its public part."""

    id: KeyId
    name: str
    grants: tuple[Grant, ...]
    state: ApiKeyState
    created_at: datetime
    expires_at: datetime | None = None
    last_used_at: datetime | None = None
    """To about a minute."""
    revoked_at: datetime | None = None


class IssuedApiKey(msgspec.Struct, frozen=True):
    """A new key with its text, which nobody can tell again."""

    key: ApiKey
    plain: PlainKey


class ApiKeyStore:
    """Changes keys in the name of `actor`, who is written to the audit trail."""

    def __init__(self, database: Database, on_revoked: Callable[[], None] | None = None) -> None:
        self.database = database
        self._on_revoked = on_revoked
        """Called after the commit, so that who remembers keys in this process need not wait to be told."""

    async def create(
        self, name: str, grants: Sequence[GrantSpec], *, actor: str, expires_s: float | None = None
    ) -> IssuedApiKey:
        """A key that expires `expires_s` from now, or never."""
        plain = new_key(secrets.token_bytes(ENTROPY_BYTES))
        made = await self.add(plain, name, grants, actor=actor, expires_s=expires_s)
        assert made is not None, "an id of 50 random bits was taken"
        return IssuedApiKey(made, plain)

    async def add(
        self, plain: PlainKey, name: str, grants: Sequence[GrantSpec], *, actor: str, expires_s: float | None = None
    ) -> ApiKey | None:
        """Take in a key that somebody has already; None, and nothing changed, when its id is there."""
        validate_key_name(name)
        lasts_s, wanted = validate_expiry(expires_s), validate_grants(grants)
        async with self.database.transaction() as tx:
            shows = await _resolve_shows(tx, wanted)
            if await tx.value(ADD, plain.id, plain.digest, name, lasts_s) is None:
                return None
            await _insert_grants(tx, plain.id, wanted, shows)
            return await _record(tx, actor, "key.create", None, await _get(tx, plain.id))

    async def list(self, *, revoked: bool = False) -> Sequence[ApiKey]:
        """The newest first; with `revoked` also those that are."""
        return [_key_from_row(row) for row in await self.database.rows(LIST, revoked, None)]

    async def find(self, text: str) -> ApiKey:
        """By id, by the beginning of one, or by a name that a single key has; never revoked ones by name."""
        keys, given = await self.list(revoked=True), without_secret(text)
        by_id = [key for key in keys if key.id == given]
        named = [key for key in keys if key.name == given and key.state != "revoked"]
        begun = [key for key in keys if len(given) >= PREFIX_CHARS_MIN and key.id.startswith(given)]
        found = by_id or named or begun
        if not found:
            names = {key.name: None for key in keys if key.state != "revoked"}
            raise unknown_name_error("key", given, [*names, *(key.id for key in keys)])
        if len(found) > 1:
            ids = ", ".join(key.id for key in found[:5])
            raise InvalidInput(f"{len(found)} keys go by {given!r}: give the id of one ({ids}).")
        return found[0]

    async def revoke(self, key: KeyId, *, actor: str) -> tuple[ApiKey, bool]:
        """The key as it is now, and whether that changed anything. It is refused everywhere within a second."""
        async with self.database.transaction() as tx:
            before = await _get(tx, key)
            if await tx.value(REVOKE, key) is None:
                return await _get(tx, key), False
            failpoints.hit("access.after_revoke_before_audit")
            revoked = await _record(tx, actor, "key.revoke", before, await _get(tx, key))
        if self._on_revoked is not None:
            self._on_revoked()
        return revoked, True


async def _resolve_shows(tx: Transaction, wanted: Sequence[GrantSpec]) -> Mapping[str, ShowId]:
    shows = {row["name"]: ShowId(row["id"]) for row in await tx.rows(SHOWS)}
    for spec in wanted:
        if spec.show is not None and spec.show not in shows:
            raise unknown_name_error("show", spec.show, shows)
    return shows


async def _insert_grants(tx: Transaction, key: KeyId, wanted: Sequence[GrantSpec], shows: Mapping[str, ShowId]) -> None:
    roles = [spec.role.value for spec in wanted]
    where = [None if spec.show is None else shows[spec.show] for spec in wanted]
    try:
        await tx.run(GRANT, key, roles, where)
    except asyncpg.ForeignKeyViolationError as error:
        raise InvalidInput("A show of the key was deleted just now: look at `rota show list`.") from error


async def _get(tx: Transaction, key: KeyId) -> ApiKey:
    row = await tx.row(LIST, True, [key])
    if row is None:
        raise NotFound(f"There is no key {key[:40]!r}: `rota keys list` shows those there are.", nearest=None)
    return _key_from_row(row)


async def _record(tx: Transaction, actor: str, action: str, before: ApiKey | None, after: ApiKey) -> ApiKey:
    """The audit entry comes last, because all who audit wait for each other."""
    detail = {"before": _audit_fields(before), "after": _audit_fields(after)}
    await audit.append(tx, [AuditEntry(actor, action, f"key:{after.id}", detail)])
    return after


def _audit_fields(key: ApiKey | None) -> Mapping[str, object] | None:
    if key is None:
        return None
    grants = [str(grant) for grant in key.grants]
    return {"name": key.name, "grants": grants, "state": key.state, "expires": msgspec.to_builtins(key.expires_at)}


def _key_from_row(row: Record) -> ApiKey:
    return ApiKey(
        id=KeyId(row["id"]),
        name=row["name"],
        grants=decode_grants(row["grants"]),
        state=row["state"],
        created_at=row["ts_created"],
        expires_at=row["ts_expires"],
        last_used_at=row["ts_last_used"],
        revoked_at=row["ts_revoked"],
    )


def decode_grants(text: str) -> tuple[Grant, ...]:
    return msgspec.json.decode(text, type=tuple[Grant, ...])
