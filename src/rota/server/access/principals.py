"""Administration of principals: create, list, disable. Their names are never changed and never free again.

Concurrent creators of one name are ordered by the unique index: one creates it, the others are refused. A transaction
that adds a key or counts a vote locks the principal's row (`hold_principal`, `rota.principal_active`): it commits
before the principal is disabled, or is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rota.accounting.resources import unknown_name_error
from rota.api.admin import PrincipalView
from rota.infra import audit, failpoints
from rota.infra.audit import AuditEntry
from rota.infra.postgres import Database, Record, Transaction, query
from rota.model.errors import NameTaken, NotFound, PrincipalDisabled
from rota.model.identity.principals import PrincipalId, PrincipalKind, validate_principal_name

ADD = query(__package__, "principal_add")
HOLD = query(__package__, "principal_hold")
LIST = query(__package__, "principal_list")
DISABLE = query(__package__, "principal_disable")


class PrincipalStore:
    """Changes principals on behalf of `actor`, whom the audit log names."""

    def __init__(self, database: Database, on_disabled: Callable[[], None] | None = None) -> None:
        self.database = database
        self._on_disabled = on_disabled
        """Called after the commit: clears this process's key cache without waiting for the notification."""

    async def create(self, name: str, kind: PrincipalKind, *, actor: str) -> PrincipalView:
        """Create a global principal; raises NameTaken if there is or was one of this name."""
        async with self.database.transaction() as tx:
            await add_principal(tx, name, kind, is_global=True)
            return await _record(tx, actor, "principal.create", name)

    async def list(self) -> Sequence[PrincipalView]:
        """By name, with disabled ones."""
        return [_view_from_row(row) for row in await self.database.rows(LIST, None)]

    async def disable(self, name: str, *, actor: str) -> tuple[PrincipalView, bool]:
        """Disable it with all its keys, for good; the view after the change, and whether it changed."""
        async with self.database.transaction() as tx:
            if await tx.value(DISABLE, name) is None:
                return await _get(tx, name), False
            failpoints.hit("access.after_disable_before_audit")
            disabled = await _record(tx, actor, "principal.disable", name)
        if self._on_disabled is not None:
            self._on_disabled()
        return disabled, True


async def add_principal(tx: Transaction, name: str, kind: PrincipalKind, *, is_global: bool) -> PrincipalId:
    validate_principal_name(name)
    created = await tx.value(ADD, name, kind.value, is_global)
    if created is None:
        raise NameTaken(
            f"There is a principal {name}, and its name is never given to another: choose another name. Only {name} and"
            f" admins of every show can add a key for it, with `rota keys create {name} --for {name}`.",
            principal=name,
        )
    return PrincipalId(created)


async def hold_principal(tx: Transaction, name: str) -> PrincipalId:
    """An existing principal, which is not disabled before the transaction ends."""
    row = await tx.row(HOLD, name)
    if row is None:
        raise unknown_name_error("principal", name, [each["name"] for each in await tx.rows(LIST, None)])
    if row["ts_disabled"] is not None:
        raise PrincipalDisabled(f"The principal {name} is disabled: create another one.", principal=name)
    return PrincipalId(row["id"])


async def _get(tx: Transaction, name: str) -> PrincipalView:
    row = await tx.row(LIST, [name])
    if row is None:
        raise NotFound(f"There is no principal {name[:64]!r}: list them with `rota principals list`.", nearest=None)
    return _view_from_row(row)


async def _record(tx: Transaction, actor: str, action: str, name: str) -> PrincipalView:
    """Write the audit entry last: audit writers serialize on a lock that is held until commit."""
    view = await _get(tx, name)
    detail = {"kind": view.kind.value, "keys": view.keys, "global": view.is_global}
    await audit.append(tx, [AuditEntry(actor, action, f"principal:{name}", detail)])
    return view


def _view_from_row(row: Record) -> PrincipalView:
    return PrincipalView(
        name=row["name"],
        kind=PrincipalKind(row["kind"]),
        is_global=row["b_global"],
        keys=row["keys"],
        created_at=row["ts_created"],
        disabled_at=row["ts_disabled"],
    )
