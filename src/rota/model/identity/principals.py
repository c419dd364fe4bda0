"""Principals: the people and services to whom API keys belong, and how rules compare them. Pure.

* The name of a principal is unique for ever: it cannot change, and is not given to another after the principal was
  disabled. Rules therefore compare names; keys of one principal are one person.
* A submission that comes without a key names its submitter itself. Rota stores that claim behind the interface it came
  by (`bus:ann`). Names of principals have no colon, so a claim never equals one.
* An unverified submitter may be any principal. A rule that excludes the submitter of a job then excludes every
  principal: only a verified submitter can be told apart from a voter.
"""

from __future__ import annotations

import re
from enum import StrEnum
from typing import Final, Literal, NewType
from uuid import UUID

import msgspec

from rota.model.errors import InvalidInput
from rota.model.identity.api_key_format import KEY_PREFIX

PrincipalId = NewType("PrincipalId", UUID)
UnverifiedFace = Literal["cli", "bus", "sql"]
"""Interfaces without keys: the command line on PostgreSQL, NATS, and a transaction of the caller's."""

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,63}", re.ASCII)
_UNVERIFIED_CHARS_MAX: Final = 500
_UNKNOWN: Final = "unknown"


class PrincipalKind(StrEnum):
    PERSON = "person"
    SERVICE = "service"


class Principal(msgspec.Struct, frozen=True):
    """Whom a key belongs to."""

    name: str
    is_global: bool = True
    """Created by an admin of every show. `approvers` of a policy can name only such principals: the admin of one show
    could otherwise create a principal with a name that a policy reserves for a person who has no key yet."""
    shared_name: str = ""
    """The name of several keys from before there were principals, if this is not the one that kept it. It gives no
    right; what was done under it counts as done by this principal, too."""

    @property
    def names(self) -> frozenset[str]:
        """Under which jobs and votes of this principal may be stored."""
        return frozenset({self.name, self.shared_name} - {""})


def parse_kind(text: str) -> PrincipalKind:
    try:
        return PrincipalKind(text.lower())
    except ValueError as error:
        raise InvalidInput(f"{text[:40]!r} is not a kind of principal: use person or service.") from error


def is_unverified(name: str) -> bool:
    return ":" in name


def unverified_name(face: UnverifiedFace, claimed: str) -> str:
    """What is stored as the principal of a submission that came without a key."""
    return f"{face}:{claimed or _UNKNOWN}"[:_UNVERIFIED_CHARS_MAX]


def validate_principal_name(name: str, subject: str = "principal") -> str:
    if name.startswith(KEY_PREFIX):
        raise InvalidInput(
            f"A {subject} name cannot begin with {KEY_PREFIX}, the prefix of keys themselves: choose another."
        )
    if not _NAME.fullmatch(name):
        shown = repr(name if len(name) <= 40 else f"{name[:37]}...")
        raise InvalidInput(
            f"{shown} is not a valid {subject} name: use up to 64 letters, digits, dots, hyphens and underscores."
        )
    return name
