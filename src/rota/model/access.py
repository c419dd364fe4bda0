"""Authorization: roles, the grants of a key, and permission checks. Pure.

* Roles are ordered; each includes the ones below it:
  viewer (reads) < submitter (submits, cancels and retries jobs) < operator (priority CRITICAL, other users' queues,
  workers and dead letters) < admin (shows, quotas, keys).
* A grant is a role in one show, or in every show including future ones. Shows are granted by id: a renamed show keeps
  its grants, and a new show under an old name has none.
* Operations on no single show (`show=None`: pools, workers, settings) need the role in every show.
* Permission is checked by show name before the show is looked up, so that a caller without a grant cannot learn whether
  it exists.
"""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches
from enum import Enum
from functools import total_ordering
from typing import Final
from uuid import UUID

import msgspec

from rota.model.errors import Forbidden, InvalidInput
from rota.model.identity.api_key_format import KeyId
from rota.model.identity.principals import Principal, validate_principal_name
from rota.model.ids import ShowId
from rota.model.jobs.submission import CRITICAL, PRIORITIES, Submission

EXPIRES_S_MAX: Final = 3650 * 86_400.0
GRANTS_MAX: Final = 256


@total_ordering
class Role(Enum):
    VIEWER = "viewer"
    SUBMITTER = "submitter"
    OPERATOR = "operator"
    ADMIN = "admin"

    def __lt__(self, other: Role) -> bool:
        return _RANK[self] < _RANK[other]

    def __str__(self) -> str:
        return self.value


_RANK: Final = {role: rank for rank, role in enumerate(Role)}


class ShowRef(msgspec.Struct, frozen=True):
    id: ShowId
    name: str


class Grant(msgspec.Struct, frozen=True):
    role: Role
    show: ShowRef | None = None
    """None: every show."""

    def covers(self, show: ShowId | str | None) -> bool:
        if self.show is None:
            return True
        return show is not None and show == (self.show.id if isinstance(show, UUID) else self.show.name)

    def __str__(self) -> str:
        return f"{self.role} in {self.show.name}" if self.show else f"{self.role} in every show"


class GrantSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A grant to be created; shows are referenced by name."""

    role: Role
    show: str | None = None


class Actor(msgspec.Struct, frozen=True):
    """A principal who called with a valid key."""

    key: KeyId
    name: str
    """The name of the key, for people. Rules compare principals."""
    principal: Principal
    grants: tuple[Grant, ...] = ()

    def role(self, show: ShowId | str | None = None) -> Role | None:
        """The highest role in `show`; without a show, in every show."""
        return max((grant.role for grant in self.grants if grant.covers(show)), default=None)

    def has_role(self, role: Role, show: ShowId | str | None = None) -> bool:
        has = self.role(show)
        return has is not None and has >= role

    def has_role_in_any_show(self, role: Role) -> bool:
        return any(grant.role >= role for grant in self.grants)

    def shows_with_role(self, role: Role) -> frozenset[ShowId] | None:
        """The shows in which it has `role`, for list filters; None if that is every show."""
        if self.has_role(role):
            return None
        return frozenset(grant.show.id for grant in self.grants if grant.show is not None and grant.role >= role)

    @property
    def audited(self) -> str:
        """Its name in the audit log: the principal, and the key."""
        return f"key:{self.principal.name}:{self.key}"


def require_role(actor: Actor, role: Role, show: ShowId | str | None = None) -> None:
    """Raises Forbidden unless `actor` has `role` in `show`; without a show, in every one."""
    if actor.has_role(role, show):
        return
    actual = actor.role(show)
    place = "every show" if show is None else f"show {show[:64]}" if isinstance(show, str) else "this show"
    held = f"the role {actual} in" if actual else "no role in" if show else "no role that applies to"
    option = f" --show {show[:64]}" if isinstance(show, str) else ""
    raise Forbidden(
        f"The key {actor.name} has {held} {place}, but this requires {role}: use another key, or create one with"
        f" `rota keys create NAME --role {role}{option}`.",
        needs=role.value,
        has=actual.value if actual else None,
    )


def require_role_in_any_show(actor: Actor, role: Role) -> None:
    """Raises Forbidden unless `actor` has `role` in at least one show."""
    if not actor.has_role_in_any_show(role):
        raise Forbidden(
            f"The key {actor.name} does not have the role {role} in any show: use another key, or create one with"
            f" `rota keys create NAME --role {role}`.",
            needs=role.value,
        )


def require_submit_role(actor: Actor, submission: Submission) -> None:
    """Submitting requires submitter in the show, and operator for priority CRITICAL."""
    require_role(actor, role_required_to_submit(submission.priority), submission.show)


def require_grant_role(actor: Actor, shows: Iterable[ShowId | str | None]) -> None:
    """Raises Forbidden unless `actor` is admin in all of `shows`, as managing keys with grants there requires."""
    for show in shows:
        require_role(actor, Role.ADMIN, show)


def require_key_owner(actor: Actor, principal: str) -> None:
    """Raises Forbidden unless `actor` may add keys for the existing `principal`: itself, or any with admin everywhere.

    It does not say whether the principal exists: names belong to other shows, too.
    """
    if principal != actor.principal.name and not actor.has_role(Role.ADMIN):
        raise Forbidden(
            f"Only {principal[:64]} and admins of every show can add a key for the principal {principal[:64]}: leave"
            " the principal out to create a new one under the name of the key.",
            needs=Role.ADMIN.value,
        )


def role_required_to_submit(priority: int | str) -> Role:
    number = PRIORITIES.get(priority.upper(), 0) if isinstance(priority, str) else priority
    return Role.OPERATOR if number >= CRITICAL else Role.SUBMITTER


def parse_role(text: str) -> Role:
    names = [role.value for role in Role]
    if text.lower() in names:
        return Role(text.lower())
    near = get_close_matches(text.lower(), names, n=1, cutoff=0.5)
    hint = f"did you mean {near[0]}?" if near else f"use {', '.join(names[:-1])} or {names[-1]}."
    raise InvalidInput(f"{text[:40]!r} is not a known role: {hint}", nearest=near[0] if near else None)


def validate_key_name(name: str) -> str:
    return validate_principal_name(name, "key")


def validate_expiry(seconds: float | None) -> float | None:
    if seconds is None or 1.0 <= seconds <= EXPIRES_S_MAX:
        return seconds
    raise InvalidInput(
        "The lifetime of a key is out of range: use 1s to 3650d, or none for a key that does not expire."
    )


def validate_grants(specs: Iterable[GrantSpec]) -> tuple[GrantSpec, ...]:
    """One or more grants, at most one per show. An empty show name does not mean every show."""
    found = tuple(specs)
    shows = [spec.show for spec in found]
    if not 1 <= len(found) <= GRANTS_MAX:
        raise InvalidInput(f"A key must have 1 to {GRANTS_MAX} grants, not {len(found)}: name a role and its shows.")
    if len(set(shows)) < len(shows):
        raise InvalidInput("A key can have only one role per show: name every show once.")
    return found
