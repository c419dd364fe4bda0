"""Administration of API keys: create, list, revoke.

Each change and its audit entry are one transaction. `revoke` is idempotent; a repeated `create` makes another key,
because the secret of the first cannot be shown again.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Final

import asyncpg
import msgspec

from rota.accounting.resources import unknown_name_error
from rota.api.admin import KeyState
from rota.infra import audit, failpoints
from rota.infra.audit import AuditEntry
from rota.infra.postgres import Database, Record, Transaction, query
from rota.model.access import Grant, GrantSpec, validate_expiry, validate_grants, validate_key_name
from rota.model.errors import InvalidInput, NotFound, Refused
from rota.model.identity.api_key_format import ENTROPY_BYTES, KeyId, PlainKey, new_key, without_secret
from rota.model.identity.principals import PrincipalId, PrincipalKind
from rota.model.ids import ShowId
from rota.server.access.principals import add_principal, hold_principal

ADD = query(__package__, "key_add")
GRANT = query(__package__, "key_grant")
SHOWS = query(__package__, "key_shows")
LIST = query(__package__, "key_list")
REVOKE = query(__package__, "key_revoke")

PREFIX_CHARS_MIN: Final = 4


class ApiKey(msgspec.Struct, frozen=True):
    """A key without its secret; `id` is the public part of the key."""

    id: KeyId
    name: str
    principal: str
    """The name of its principal."""
    grants: tuple[Grant, ...]
    state: KeyState
    created_at: datetime
    expires_at: datetime | None = None
    last_used_at: datetime | None = None
    """Accurate to about a minute."""
    revoked_at: datetime | None = None


class NewPrincipal(msgspec.Struct, frozen=True):
    """The principal that a new key gets under its own name."""

    kind: PrincipalKind = PrincipalKind.SERVICE
    is_global: bool = True


NEW_SERVICE: Final = NewPrincipal()


class IssuedApiKey(msgspec.Struct, frozen=True):
    """A new key with its text, which cannot be shown again."""

    key: ApiKey
    plain: PlainKey


class ApiKeyStore:
    """Changes keys on behalf of `actor`, whom the audit log names."""

    def __init__(self, database: Database, on_revoked: Callable[[], None] | None = None) -> None:
        self.database = database
        self._on_revoked = on_revoked
        """Called after the commit: clears this process's key cache without waiting for the notification."""

    async def create(
        self,
        name: str,
        grants: Sequence[GrantSpec],
        *,
        actor: str,
        expires_s: float | None = None,
        owner: str | NewPrincipal = NEW_SERVICE,
    ) -> IssuedApiKey:
        """Create a key that expires in `expires_s`, or never.

        `owner` is an existing principal, or the kind of a new one with the name of the key.
        """
        plain = new_key(secrets.token_bytes(ENTROPY_BYTES))
        stored = await self.add(plain, name, grants, actor=actor, expires_s=expires_s, owner=owner)
        assert stored is not None, "an id of 50 random bits was taken"
        return IssuedApiKey(stored, plain)

    async def add(
        self,
        plain: PlainKey,
        name: str,
        grants: Sequence[GrantSpec],
        *,
        actor: str,
        expires_s: float | None = None,
        owner: str | NewPrincipal = NEW_SERVICE,
    ) -> ApiKey | None:
        """Store an existing key. None, with nothing changed, if its id is taken."""
        validate_key_name(name)
        lifetime_s, specs = validate_expiry(expires_s), validate_grants(grants)
        async with self.database.transaction() as tx:
            shows = await _resolve_shows(tx, specs)
            if await tx.row(LIST, True, [plain.id]) is not None:
                return None
            principal = await _principal_of(tx, name, owner)
            if await tx.value(ADD, plain.id, plain.digest, name, lifetime_s, principal) is None:
                raise Refused("The same key is being added by another process: try again.")
            await _insert_grants(tx, plain.id, specs, shows)
            return await _record(tx, actor, "key.create", None, await _get(tx, plain.id))

    async def list(self, *, revoked: bool = False) -> Sequence[ApiKey]:
        """Keys, newest first; with `revoked` also revoked ones."""
        return [_key_from_row(row) for row in await self.database.rows(LIST, revoked, None)]

    async def find(self, text: str) -> ApiKey:
        """Find a key by id, by an id prefix, or by a unique name; a revoked key is never found by name."""
        keys, name_or_id = await self.list(revoked=True), without_secret(text)
        by_id = [key for key in keys if key.id == name_or_id]
        by_name = [key for key in keys if key.name == name_or_id and key.state != "revoked"]
        by_prefix = [key for key in keys if len(name_or_id) >= PREFIX_CHARS_MIN and key.id.startswith(name_or_id)]
        found = by_id or by_name or by_prefix
        if not found:
            names = {key.name: None for key in keys if key.state != "revoked"}
            raise unknown_name_error("key", name_or_id, [*names, *(key.id for key in keys)])
        if len(found) > 1:
            ids = ", ".join(key.id for key in found[:5])
            raise InvalidInput(f"{len(found)} keys match {name_or_id!r}: use the id of one ({ids}).")
        return found[0]

    async def revoke(self, key: KeyId, *, actor: str) -> tuple[ApiKey, bool]:
        """The key after the change, and whether it changed. Every process refuses it within a second."""
        async with self.database.transaction() as tx:
            before = await _get(tx, key)
            if await tx.value(REVOKE, key) is None:
                return await _get(tx, key), False
            failpoints.hit("access.after_revoke_before_audit")
            revoked = await _record(tx, actor, "key.revoke", before, await _get(tx, key))
        if self._on_revoked is not None:
            self._on_revoked()
        return revoked, True


async def _principal_of(tx: Transaction, name: str, owner: str | NewPrincipal) -> PrincipalId:
    if isinstance(owner, str):
        return await hold_principal(tx, owner)
    return await add_principal(tx, name, owner.kind, is_global=owner.is_global)


async def _resolve_shows(tx: Transaction, specs: Sequence[GrantSpec]) -> Mapping[str, ShowId]:
    shows = {row["name"]: ShowId(row["id"]) for row in await tx.rows(SHOWS)}
    for spec in specs:
        if spec.show is not None and spec.show not in shows:
            raise unknown_name_error("show", spec.show, shows)
    return shows


async def _insert_grants(tx: Transaction, key: KeyId, specs: Sequence[GrantSpec], shows: Mapping[str, ShowId]) -> None:
    roles = [spec.role.value for spec in specs]
    where = [None if spec.show is None else shows[spec.show] for spec in specs]
    try:
        await tx.run(GRANT, key, roles, where)
    except asyncpg.ForeignKeyViolationError as error:
        raise InvalidInput("A show of the key was just deleted: check `rota show list`.") from error


async def _get(tx: Transaction, key: KeyId) -> ApiKey:
    row = await tx.row(LIST, True, [key])
    if row is None:
        raise NotFound(f"There is no key {key[:40]!r}: list the keys with `rota keys list`.", nearest=None)
    return _key_from_row(row)


async def _record(tx: Transaction, actor: str, action: str, before: ApiKey | None, after: ApiKey) -> ApiKey:
    """Write the audit entry last: audit writers serialize on a lock that is held until commit."""
    detail = {"before": _audit_fields(before), "after": _audit_fields(after)}
    await audit.append(tx, [AuditEntry(actor, action, f"key:{after.id}", detail)])
    return after


def _audit_fields(key: ApiKey | None) -> Mapping[str, object] | None:
    if key is None:
        return None
    grants = [str(grant) for grant in key.grants]
    return {
        "name": key.name,
        "principal": key.principal,
        "grants": grants,
        "state": key.state,
        "expires": msgspec.to_builtins(key.expires_at),
    }


def _key_from_row(row: Record) -> ApiKey:
    return ApiKey(
        id=KeyId(row["id"]),
        name=row["name"],
        principal=row["principal"],
        grants=decode_grants(row["grants"]),
        state=row["state"],
        created_at=row["ts_created"],
        expires_at=row["ts_expires"],
        last_used_at=row["ts_last_used"],
        revoked_at=row["ts_revoked"],
    )


def decode_grants(text: str) -> tuple[Grant, ...]:
    return msgspec.json.decode(text, type=tuple[Grant, ...])
