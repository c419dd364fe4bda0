"""`rota keys`: each command is one change with its audit entry, or one read.

Whoever loses the reply to `create` has a key that nobody can use: it is listed as never used, and `create` names it the
next time the same name is given. `revoke` may be given again: what is revoked stays so.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from datetime import UTC, datetime

import msgspec

from rota.cli import db
from rota.cli.books import actor, print_page
from rota.cli.books_view import Page, Table
from rota.cli.form import Form
from rota.infra.postgres import check_current
from rota.model.access import GrantSpec, Role, parse_role
from rota.model.settings import Settings
from rota.model.units import parse_duration, span
from rota.server.access import Key, Keys

NO_KEYS = "There is no key: `rota keys create NAME --role ROLE` makes one."
SHOWN_ONCE = "It is shown this once: keep it where only its user can read it."


def run(settings: Settings, work: Callable[[Keys], Awaitable[Page]], *, form: Form) -> None:
    async def done() -> Page:
        async with db.opened(settings) as database:
            await check_current(database)
            return await work(Keys(database))

    print_page(asyncio.run(done()), form=form)


async def created(keys: Keys, name: str, role: str, shows: Sequence[str] | None, expires: str | None) -> Page:
    specs = _specs(parse_role(role), shows)
    lasts_s = None if expires is None else parse_duration(expires)
    twins = [key for key in await keys.list() if key.name == name]
    made = await keys.create(name, specs, actor=actor(), expires_s=lasts_s)
    notes = [_twin(twin) for twin in twins]
    expiry = f", until {_moment(made.key.expires_at)}" if made.key.expires_at else ""
    told = f"Made key {made.key.id} ({name}): {_grants(made.key)}{expiry}."
    return Page(_data(made.key) | {"key": made.plain.text, "notes": notes}, [told, made.plain.text, SHOWN_ONCE, *notes])


def _specs(role: Role, shows: Sequence[str] | None) -> list[GrantSpec]:
    return [GrantSpec(role, show) for show in shows] if shows else [GrantSpec(role)]


def _twin(key: Key) -> str:
    used = f"last used {_ago(key.last_used_at)}" if key.last_used_at else "never used"
    return (
        f"There is another key {key.name}, {key.id}, made {_ago(key.created_at)} and {used}: "
        f"`rota keys revoke {key.id}` if nobody needs it."
    )


async def listed(keys: Keys, *, everything: bool) -> Page:
    found = await keys.list(revoked=everything)
    if not found:
        return Page([], [NO_KEYS])
    columns = ("id", "name", "may", "state", "made", "expires", "last used")
    return Page([_data(key) for key in found], [Table(columns, [_row(key) for key in found])])


async def revoked(keys: Keys, text: str) -> Page:
    found = await keys.find(text)
    key, changed = await keys.revoke(found.id, actor=actor())
    told = (
        f"Key {key.id} ({key.name}) is revoked: it is refused everywhere within a second."
        if changed
        else f"Nothing changed: key {key.id} ({key.name}) was revoked {_ago(key.revoked_at)}."
    )
    return Page(_data(key) | {"changed": changed}, [told])


def _row(key: Key) -> tuple[object, ...]:
    expires = _moment(key.expires_at) if key.expires_at else "never"
    used = _ago(key.last_used_at) if key.last_used_at else "never"
    return key.id, key.name, _grants(key), key.state, _ago(key.created_at), expires, used


def _data(key: Key) -> dict[str, object]:
    data = msgspec.to_builtins(key)
    assert isinstance(data, dict)
    return data


def _grants(key: Key) -> str:
    """`submitter in film, short`; what is left when shows were deleted may be nothing."""
    roles = dict.fromkeys(grant.role for grant in key.grants)
    return "; ".join(f"{role} in {_places(key, role)}" for role in roles) or "nothing"


def _places(key: Key, role: Role) -> str:
    granted = [grant.show for grant in key.grants if grant.role is role]
    return ", ".join(show.name if show else "every show" for show in granted)


def _moment(at: datetime | None) -> str:
    return f"{at.astimezone(UTC):%Y-%m-%d %H:%M} UTC" if at else ""


def _ago(at: datetime | None) -> str:
    """As this machine's clock has it, which may lag behind that of PostgreSQL."""
    return f"{span(max(0.0, (datetime.now(UTC) - at).total_seconds()))} ago" if at else ""
