"""Administration: the accounting ledger, principals and their API keys, the audit log and the settings."""

from __future__ import annotations

from typing import Annotated

from litestar import Controller, delete, get, post
from litestar.params import FromQuery, JSONBody, PathParameter, QueryParameter

from rota.accounting import audit as auditing
from rota.accounting.audit import LedgerAudit, LedgerAuditLine
from rota.api.admin import (
    CallerView,
    CreatedKey,
    KeySpec,
    KeyView,
    LedgerLineView,
    LedgerView,
    PrincipalSpec,
    PrincipalView,
    ResourceAmount,
    SettingView,
)
from rota.api.pages import Page
from rota.infra import audit
from rota.infra.audit import AuditEntry, AuditRecord
from rota.model.access import Actor, Grant, GrantSpec, Role, require_grant_role, require_key_owner
from rota.model.errors import NotFound
from rota.model.quota import Usage
from rota.model.settings.leaves import leaves
from rota.model.settings.listing import masked_value
from rota.server.access import ApiKey, NewPrincipal
from rota.server.http.codec import ApiRequest
from rota.server.http.pagination import LIMIT_DEFAULT, Limit, paginate
from rota.server.http.permissions import Deps, requires
from rota.server.http.routes.shows import ShowPath

KeyPath = Annotated[str, PathParameter(max_length=64, description="The id of a key.")]
PrincipalPath = Annotated[str, PathParameter(max_length=64, description="The name of a principal.")]
AuditFilterQuery = Annotated[str | None, QueryParameter(max_length=200)]


class LedgerRoutes(Controller):
    path = "/shows/{show:str}/ledger"
    tags = ("ledger",)

    @get(opt=requires(Role.VIEWER, "show"))
    async def audit_ledger(self, deps: Deps, show: ShowPath) -> LedgerView:
        """Compare procs, counter tables and Redis counters; bookings continue meanwhile."""
        return _ledger_view(await auditing.audit(deps.books, await deps.books.admin.show(show)))

    @post("/repair", opt=requires(Role.ADMIN, "show"), status_code=200)
    async def repair_ledger(self, request: ApiRequest, deps: Deps, show: ShowPath) -> LedgerView:
        """Reset counters, limits and tables to the bookings in PostgreSQL, and compare again."""
        found = await deps.books.admin.show(show)
        await auditing.repair(deps.books, found)
        after = await auditing.audit(deps.books, await deps.books.admin.show(show))
        async with deps.database.transaction() as tx:
            await audit.append(tx, [AuditEntry(request.user.audited, "ledger.repair", f"show:{found.id}")])
        return _ledger_view(after)


class KeyRoutes(Controller):
    path = "/keys"
    tags = ("keys",)

    @get(opt=requires(Role.ADMIN, "somewhere"))
    async def find_keys(self, request: ApiRequest, deps: Deps, revoked: FromQuery[bool] = False) -> Page[KeyView]:
        """List the keys whose grants are all in shows that the calling key administers."""
        found = await deps.keys.list(revoked=revoked)
        return Page([_key_view(key) for key in found if _may_manage(request.user, key)])

    @post(opt=requires(Role.ADMIN, "somewhere"))
    async def create_key(self, request: ApiRequest, deps: Deps, data: JSONBody[KeySpec]) -> CreatedKey:
        """Create a key; its text is in this response only. It belongs to a new principal or, if the body names one, to
        that of the calling key; an admin of every show can name any."""
        actor = request.user
        require_grant_role(actor, [grant.show for grant in data.grants])
        if data.principal:
            require_key_owner(actor, data.principal)
        owner = data.principal or NewPrincipal(data.kind, is_global=actor.has_role(Role.ADMIN))
        issued = await deps.keys.create(
            data.name, data.grants, actor=actor.audited, expires_s=data.expires_s, owner=owner
        )
        return CreatedKey(_key_view(issued.key), issued.plain.text)

    @delete("/{key:str}", opt=requires(Role.ADMIN, "somewhere"), status_code=200)
    async def revoke_key(self, request: ApiRequest, deps: Deps, key: KeyPath) -> KeyView:
        """Revoke a key for good; every server refuses it within a second."""
        for found in await deps.keys.list(revoked=True):
            if found.id == key and _may_manage(request.user, found):
                revoked, _ = await deps.keys.revoke(found.id, actor=request.user.audited)
                return _key_view(revoked)
        raise NotFound(
            f"There is no key with the id {key[:40]!r} that this key may revoke: list the keys to see their ids."
        )


class PrincipalRoutes(Controller):
    path = "/principals"
    tags = ("principals",)

    @get(opt=requires(Role.ADMIN, "everywhere"))
    async def find_principals(self, deps: Deps) -> Page[PrincipalView]:
        """List principals by name, disabled ones too."""
        return Page([*await deps.principals.list()])

    @post(opt=requires(Role.ADMIN, "everywhere"))
    async def create_principal(self, request: ApiRequest, deps: Deps, data: JSONBody[PrincipalSpec]) -> PrincipalView:
        """Create a principal without keys. Its name can neither be changed nor given to another."""
        return await deps.principals.create(data.name, data.kind, actor=request.user.audited)

    @post("/{name:str}/disable", opt=requires(Role.ADMIN, "everywhere"), status_code=200)
    async def disable_principal(self, request: ApiRequest, deps: Deps, name: PrincipalPath) -> PrincipalView:
        """Disable a principal for good; every server refuses all its keys within a second."""
        disabled, _ = await deps.principals.disable(name, actor=request.user.audited)
        return disabled


class AdminRoutes(Controller):
    tags = ("admin",)

    @get("/me", opt=requires(Role.VIEWER, "somewhere"))
    async def get_me(self, request: ApiRequest) -> CallerView:
        """Show the calling key, its principal and its grants."""
        actor, grants = request.user, [_grant_spec(grant) for grant in request.user.grants]
        return CallerView(key=actor.key, name=actor.name, principal=actor.principal.name, grants=grants)

    @get("/audit", opt=requires(Role.ADMIN, "everywhere"))
    async def read_audit(
        self,
        deps: Deps,
        before: Annotated[
            int | None, QueryParameter(ge=1, le=2**63 - 1, description="`next` of the previous page.")
        ] = None,
        actor: AuditFilterQuery = None,
        action: AuditFilterQuery = None,
        limit: Limit = LIMIT_DEFAULT,
    ) -> Page[AuditRecord]:
        """Read the audit log, newest first."""
        found = await audit.newest_entries(deps.database, before=before, actor=actor, action=action, most=limit + 1)
        return paginate(found, limit, lambda entry: entry.seq)

    @get("/config", opt=requires(Role.ADMIN, "everywhere"))
    async def read_config(self, deps: Deps) -> Page[SettingView]:
        """Show the settings of the responding server; secrets are masked."""
        return Page(
            [
                SettingView(path=path, value=masked_value(deps.settings, path), unit=leaf.kind.unit or None)
                for path, leaf in leaves().items()
            ]
        )


def _ledger_view(found: LedgerAudit) -> LedgerView:
    return LedgerView(
        show=found.show.name,
        ok=found.ok,
        managed=found.show.managed,
        seeded=found.seeded,
        lines=[_line_view(line) for line in found.lines],
        damaged=list(found.damaged),
    )


def _line_view(line: LedgerAuditLine) -> LedgerLineView:
    return LedgerLineView(
        level=line.level.value,
        id=line.id,
        name=line.name,
        procs=_amount_view(line.procs),
        table=_amount_view(line.table),
        redis=None if line.redis is None else _amount_view(line.redis),
        problem=line.problem,
    )


def _amount_view(usage: Usage) -> ResourceAmount:
    return ResourceAmount(usage.cores / 100, usage.gpus)


def _may_manage(actor: Actor, key: ApiKey) -> bool:
    return all(actor.has_role(Role.ADMIN, grant.show.id if grant.show else None) for grant in key.grants)


def _key_view(key: ApiKey) -> KeyView:
    return KeyView(
        id=key.id,
        name=key.name,
        principal=key.principal,
        state=key.state,
        grants=[_grant_spec(grant) for grant in key.grants],
        created_at=key.created_at,
        expires_at=key.expires_at,
        last_used_at=key.last_used_at,
        revoked_at=key.revoked_at,
    )


def _grant_spec(grant: Grant) -> GrantSpec:
    return GrantSpec(grant.role, grant.show.name if grant.show else None)
