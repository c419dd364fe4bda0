"""Orders what a principal does after the request was authenticated against the disabling of that principal."""

from __future__ import annotations

from typing import Final

from rota.infra.postgres import Transaction, query
from rota.model.errors import PrincipalDisabled
from rota.model.identity.principals import Principal

ACTIVE: Final = query(__package__, "principal_active")


async def check_active(on: Transaction, principal: Principal) -> None:
    """Raises PrincipalDisabled, or ensures that the principal is not disabled before the transaction ends."""
    if not await on.value(ACTIVE, principal.name):
        raise PrincipalDisabled(f"The principal {principal.name} was disabled: use a key of another one.")
