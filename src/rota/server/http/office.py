"""What those who run Rota look after: the books themselves, keys, the audit trail and the settings."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from litestar import Controller, delete, get, post
from litestar.params import FromQuery, JSONBody, PathParameter, QueryParameter

from rota.accounting import audit as auditing
from rota.accounting.audit import Audited, Line
from rota.infra import audit
from rota.infra.audit import AuditEntry, Recorded
from rota.model.access import Actor, Grant, GrantSpec, Role, guard_granting
from rota.model.errors import NotFound
from rota.model.key_text import KeyId
from rota.model.office import Amount, KeyMade, KeySpec, KeyTold, LedgerTold, LineTold
from rota.model.quota import Usage
from rota.model.settings.leaves import leaves
from rota.model.settings.listing import masked
from rota.server.access import Key
from rota.server.http.books import ShowPath
from rota.server.http.pages import LIMIT, Limit, Page, page
from rota.server.http.routes import AtDesk, needs
from rota.server.http.wire import Ask

KeyPath = Annotated[str, PathParameter(max_length=64, description="The id of a key.")]
Word = Annotated[str | None, QueryParameter(max_length=200)]


class Me(msgspec.Struct, frozen=True, kw_only=True):
    """Whose key it is that asks."""

    key: KeyId
    name: str
    grants: list[GrantSpec]


class SettingTold(msgspec.Struct, frozen=True, kw_only=True):
    path: str
    value: Any
    unit: str | None = None


class LedgerRoutes(Controller):
    path = "/shows/{show:str}/ledger"
    tags = ("ledger",)

    @get(opt=needs(Role.VIEWER, "show"))
    async def audit_ledger(self, desk: AtDesk, show: ShowPath) -> LedgerTold:
        """Compare what is booked, what the tables say and what Redis counts, while bookings go on."""
        return _ledger(await auditing.audit(desk.books, await desk.books.admin.show(show)))

    @post("/repair", opt=needs(Role.ADMIN, "show"), status_code=200)
    async def repair_ledger(self, request: Ask, desk: AtDesk, show: ShowPath) -> LedgerTold:
        """Bring counters, limits and tables to what PostgreSQL says is booked, and compare again."""
        found = await desk.books.admin.show(show)
        await auditing.repair(desk.books, found)
        after = await auditing.audit(desk.books, await desk.books.admin.show(show))
        async with desk.database.transaction() as tx:
            await audit.append(tx, [AuditEntry(request.user.audited, "ledger.repair", f"show:{found.id}")])
        return _ledger(after)


class KeyRoutes(Controller):
    path = "/keys"
    tags = ("keys",)

    @get(opt=needs(Role.ADMIN, "somewhere"))
    async def find_keys(self, request: Ask, desk: AtDesk, revoked: FromQuery[bool] = False) -> Page[KeyTold]:
        """Keys all of whose grants lie in shows that the asking key administers."""
        found = await desk.keys.list(revoked=revoked)
        return Page([_key(key) for key in found if _may_handle(request.user, key)])

    @post(opt=needs(Role.ADMIN, "somewhere"))
    async def create_key(self, request: Ask, desk: AtDesk, data: JSONBody[KeySpec]) -> KeyMade:
        """A new key, which is shown in this answer and never again."""
        guard_granting(request.user, [grant.show for grant in data.grants])
        made = await desk.keys.create(data.name, data.grants, actor=request.user.audited, expires_s=data.expires_s)
        return KeyMade(_key(made.key), made.plain.text)

    @delete("/{key:str}", opt=needs(Role.ADMIN, "somewhere"), status_code=200)
    async def revoke_key(self, request: Ask, desk: AtDesk, key: KeyPath) -> KeyTold:
        """Refused everywhere within a second, and for good."""
        for found in await desk.keys.list(revoked=True):
            if found.id == key and _may_handle(request.user, found):
                revoked, _ = await desk.keys.revoke(found.id, actor=request.user.audited)
                return _key(revoked)
        raise NotFound(f"There is no key with the id {key[:40]!r} that this key may revoke: list them to see.")


class OfficeRoutes(Controller):
    tags = ("office",)

    @get("/me", opt=needs(Role.VIEWER, "somewhere"))
    async def get_me(self, request: Ask) -> Me:
        """Whose key this is, and what it may do."""
        actor = request.user
        return Me(key=actor.key, name=actor.name, grants=[_spec(grant) for grant in actor.grants])

    @get("/audit", opt=needs(Role.ADMIN, "everywhere"))
    async def read_audit(
        self,
        desk: AtDesk,
        before: Annotated[
            int | None, QueryParameter(ge=1, le=2**63 - 1, description="`next` of the page before.")
        ] = None,
        actor: Word = None,
        action: Word = None,
        limit: Limit = LIMIT,
    ) -> Page[Recorded]:
        """Who did what, the newest first."""
        found = await audit.newest(desk.database, before=before, actor=actor, action=action, most=limit + 1)
        return page(found, limit, lambda entry: entry.seq)

    @get("/config", opt=needs(Role.ADMIN, "everywhere"))
    async def read_config(self, desk: AtDesk) -> Page[SettingTold]:
        """The settings of the server that answers; secrets are masked."""
        return Page(
            [
                SettingTold(path=path, value=masked(desk.settings, path), unit=leaf.kind.unit or None)
                for path, leaf in leaves().items()
            ]
        )


def _ledger(found: Audited) -> LedgerTold:
    return LedgerTold(
        show=found.show.name,
        ok=found.ok,
        managed=found.show.managed,
        seeded=found.seeded,
        lines=[_line(line) for line in found.lines],
        damaged=list(found.damaged),
    )


def _line(line: Line) -> LineTold:
    return LineTold(
        level=line.level.value,
        id=line.id,
        name=line.name,
        procs=_amount(line.procs),
        table=_amount(line.table),
        redis=None if line.redis is None else _amount(line.redis),
        problem=line.problem,
    )


def _amount(usage: Usage) -> Amount:
    return Amount(usage.cores / 100, usage.gpus)


def _may_handle(actor: Actor, key: Key) -> bool:
    return all(actor.may(Role.ADMIN, grant.show.id if grant.show else None) for grant in key.grants)


def _key(key: Key) -> KeyTold:
    return KeyTold(
        id=key.id,
        name=key.name,
        state=key.state,
        grants=[_spec(grant) for grant in key.grants],
        created_at=key.created_at,
        expires_at=key.expires_at,
        last_used_at=key.last_used_at,
        revoked_at=key.revoked_at,
    )


def _spec(grant: Grant) -> GrantSpec:
    return GrantSpec(grant.role, grant.show.name if grant.show else None)
