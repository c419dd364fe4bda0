"""`rota keys`: each command is one read, or one change with its audit entry.

- `create`, reply lost: the key exists but its secret is lost. It is listed as never used, and the next `create` with
  the same name mentions it.
- `revoke`, reply lost: repeat it; revocation is idempotent.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from datetime import UTC, datetime

import msgspec

from rota.cli.core.output_format import OutputFormat
from rota.cli.core.tables import CliPage, Table
from rota.cli.db import commands as db_commands
from rota.cli.quota.actions import current_actor, print_page
from rota.infra.postgres import check_current
from rota.model.access import GrantSpec, Role, parse_role
from rota.model.identity.principals import parse_kind
from rota.model.settings import Settings
from rota.model.units import humanize_duration, parse_duration
from rota.server.access import ApiKey, ApiKeyStore, NewPrincipal

NO_KEYS = "There is no key: `rota keys create NAME --role ROLE` creates one."
SHOWN_ONCE_NOTE = "It is shown only once: store it where only its user can read it."


def run(settings: Settings, work: Callable[[ApiKeyStore], Awaitable[CliPage]], *, form: OutputFormat) -> None:
    async def done() -> CliPage:
        async with db_commands.open_database(settings) as database:
            await check_current(database)
            return await work(ApiKeyStore(database))

    print_page(asyncio.run(done()), form=form)


async def create_key(
    keys: ApiKeyStore,
    name: str,
    role: str,
    shows: Sequence[str] | None,
    expires: str | None,
    *,
    principal: str | None,
    kind: str,
) -> CliPage:
    specs = _grant_specs(parse_role(role), shows)
    lasts_s = None if expires is None else parse_duration(expires)
    duplicates = [key for key in await keys.list() if key.name == name]
    owner = principal or NewPrincipal(parse_kind(kind))
    created = await keys.create(name, specs, actor=current_actor(), expires_s=lasts_s, owner=owner)
    notes = [_duplicate_note(duplicate) for duplicate in duplicates]
    expiry = f", until {_format_time(created.key.expires_at)}" if created.key.expires_at else ""
    belongs = f" of {principal}" if principal else ""
    text = f"Created key {created.key.id} ({name}){belongs}: {_grants_text(created.key)}{expiry}."
    return CliPage(
        _data(created.key) | {"key": created.plain.text, "notes": notes},
        [text, created.plain.text, SHOWN_ONCE_NOTE, *notes],
    )


def _grant_specs(role: Role, shows: Sequence[str] | None) -> list[GrantSpec]:
    return [GrantSpec(role, show) for show in shows] if shows else [GrantSpec(role)]


def _duplicate_note(key: ApiKey) -> str:
    used = f"last used {_age_text(key.last_used_at)}" if key.last_used_at else "never used"
    return (
        f"There is another key {key.name}, {key.id}, created {_age_text(key.created_at)} and {used}: "
        f"`rota keys revoke {key.id}` if it is not needed."
    )


async def list_keys(keys: ApiKeyStore, *, everything: bool) -> CliPage:
    found = await keys.list(revoked=everything)
    if not found:
        return CliPage([], [NO_KEYS])
    columns = ("id", "name", "principal", "may", "state", "made", "expires", "last used")
    return CliPage([_data(key) for key in found], [Table(columns, [_row(key) for key in found])])


async def revoke_key(keys: ApiKeyStore, text: str) -> CliPage:
    found = await keys.find(text)
    key, changed = await keys.revoke(found.id, actor=current_actor())
    text = (
        f"Key {key.id} ({key.name}) is revoked: it is refused everywhere within a second."
        if changed
        else f"Nothing changed: key {key.id} ({key.name}) was revoked {_age_text(key.revoked_at)}."
    )
    return CliPage(_data(key) | {"changed": changed}, [text])


def _row(key: ApiKey) -> tuple[object, ...]:
    expires = _format_time(key.expires_at) if key.expires_at else "never"
    used = _age_text(key.last_used_at) if key.last_used_at else "never"
    return key.id, key.name, key.principal, _grants_text(key), key.state, _age_text(key.created_at), expires, used


def _data(key: ApiKey) -> dict[str, object]:
    data = msgspec.to_builtins(key)
    assert isinstance(data, dict)
    return data


def _grants_text(key: ApiKey) -> str:
    """For example `submitter in film, short`. Empty grants are possible after shows were deleted."""
    roles = dict.fromkeys(grant.role for grant in key.grants)
    return "; ".join(f"{role} in {_shows_text(key, role)}" for role in roles) or "nothing"


def _shows_text(key: ApiKey, role: Role) -> str:
    granted = [grant.show for grant in key.grants if grant.role is role]
    return ", ".join(show.name if show else "every show" for show in granted)


def _format_time(at: datetime | None) -> str:
    return f"{at.astimezone(UTC):%Y-%m-%d %H:%M} UTC" if at else ""


def _age_text(at: datetime | None) -> str:
    """By this machine's clock, which may lag behind PostgreSQL's."""
    return f"{humanize_duration(max(0.0, (datetime.now(UTC) - at).total_seconds()))} ago" if at else ""
