"""`rota principals`: each command is one read, or one change with its audit entry."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Final

import msgspec

from rota.api.admin import PrincipalView
from rota.cli.core.output_format import OutputFormat
from rota.cli.core.tables import CliPage, Table
from rota.cli.db import commands as db_commands
from rota.cli.quota.actions import current_actor, print_page
from rota.infra.postgres import check_current
from rota.model.identity.principals import parse_kind
from rota.model.settings import Settings
from rota.server.access import PrincipalStore

NO_PRINCIPALS: Final = "There is no principal: `rota keys create NAME --role ROLE` creates one with a key."


def run(settings: Settings, work: Callable[[PrincipalStore], Awaitable[CliPage]], *, form: OutputFormat) -> None:
    async def done() -> CliPage:
        async with db_commands.open_database(settings) as database:
            await check_current(database)
            return await work(PrincipalStore(database))

    print_page(asyncio.run(done()), form=form)


async def list_principals(store: PrincipalStore) -> CliPage:
    found = await store.list()
    columns = ("name", "kind", "keys", "state", "named by policies")
    return CliPage(
        msgspec.to_builtins(found), [Table(columns, [_row(each) for each in found])] if found else [NO_PRINCIPALS]
    )


async def create_principal(store: PrincipalStore, name: str, kind: str) -> CliPage:
    created = await store.create(name, parse_kind(kind), actor=current_actor())
    text = f"Created principal {name}: `rota keys create NAME --role ROLE --for {name}` creates a key for it."
    return CliPage(msgspec.to_builtins(created), [text])


async def disable_principal(store: PrincipalStore, name: str) -> CliPage:
    principal, changed = await store.disable(name, actor=current_actor())
    text = (
        f"Principal {name} is disabled: its keys are refused everywhere within a second."
        if changed
        else f"Nothing changed: principal {name} is disabled."
    )
    return CliPage(msgspec.to_builtins(principal) | {"changed": changed}, [text])


def _row(principal: PrincipalView) -> tuple[object, ...]:
    state = "active" if principal.disabled_at is None else "disabled"
    return principal.name, principal.kind.value, principal.keys, state, "yes" if principal.is_global else "no"
