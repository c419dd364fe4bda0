"""Resources for operators: `app.jobs`, `app.dlq`, `app.ledger`, `app.keys`, `app.principals`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypedDict, Unpack
from uuid import UUID

from rota.api.admin import (
    CreatedKey,
    DeadLetter,
    DeadLetterActionResult,
    DeadLetterKind,
    DeadLetterSelector,
    KeySpec,
    KeyView,
    LedgerView,
    PrincipalSpec,
    PrincipalView,
)
from rota.api.jobs import JobSummary
from rota.client.resource import ApiResource, M, api_method, url_path
from rota.model.access import GrantSpec, Role
from rota.model.identity.principals import PrincipalKind
from rota.model.job_states import JobState
from rota.sdk.task_options import DurationLike, to_seconds


class DeadLetterSelection(TypedDict, total=False):
    """Selects dead letters that match all given criteria."""

    kind: DeadLetterKind
    reason: str
    queue: str
    job: UUID


class JobsResource(ApiResource[M]):
    @api_method
    async def list(
        self,
        *,
        show: str = "",
        state: JobState | str = "",
        topic: str = "",
        reason: str = "",
        label: str = "",
        most: int = 50,
    ) -> Sequence[JobSummary]:
        """Newest first; jobs that match all given criteria. A label is "key=value"."""
        terms = {"show": show, "state": state, "topic": topic, "reason": reason, "label": label}
        query = " ".join(f'{term}:"{value}"' for term, value in terms.items() if value)
        return await self._list("/jobs", JobSummary, most=most, q=query or None)


class DeadLettersResource(ApiResource[M]):
    @api_method
    async def list(self, *, most: int = 50, **which: Unpack[DeadLetterSelection]) -> Sequence[DeadLetter]:
        """Dead letters, oldest first."""
        return await self._list("/dlq", DeadLetter, most=most, **which)

    @api_method
    async def retry(
        self, ids: Sequence[int] | None = None, **which: Unpack[DeadLetterSelection]
    ) -> DeadLetterActionResult:
        """Resubmits the selected frames and jobs as new jobs."""
        return await self._request(
            "POST", "/dlq/retry", DeadLetterActionResult, idempotent=False, body=_selection_body(ids, which)
        )

    @api_method
    async def purge(
        self, ids: Sequence[int] | None = None, **which: Unpack[DeadLetterSelection]
    ) -> DeadLetterActionResult:
        """Deletes the selected dead letters."""
        return await self._request(
            "POST", "/dlq/purge", DeadLetterActionResult, idempotent=False, body=_selection_body(ids, which)
        )


class LedgerResource(ApiResource[M]):
    @api_method
    async def audit(self, show: str) -> LedgerView:
        """Compares allocations, PostgreSQL totals and Redis counters, while bookings continue."""
        return await self._request("GET", url_path("shows", show, "ledger"), LedgerView)

    @api_method
    async def repair(self, show: str) -> LedgerView:
        """Resets the counters to the allocations in PostgreSQL, then compares again."""
        return await self._request("POST", url_path("shows", show, "ledger", "repair"), LedgerView)


class KeysResource(ApiResource[M]):
    @api_method
    async def list(self, *, revoked: bool = False) -> Sequence[KeyView]:
        return await self._list("/keys", KeyView, revoked=revoked)

    @api_method
    async def create(
        self,
        name: str,
        role: Role | str,
        *,
        shows: Sequence[str] = (),
        expires: DurationLike | None = None,
        principal: str = "",
        kind: PrincipalKind | str = PrincipalKind.SERVICE,
    ) -> CreatedKey:
        """Creates a key with this role in `shows`, or in all shows. Only this answer contains the secret.

        It belongs to `principal` or, by default, to a new principal of this `kind` with the name of the key.
        """
        grants = tuple(GrantSpec(Role(role), show) for show in shows) or (GrantSpec(Role(role)),)
        expires_s = None if expires is None else to_seconds(expires, "key lifetime")
        spec = KeySpec(
            name=name, grants=grants, expires_s=expires_s, principal=principal, kind=PrincipalKind(str(kind))
        )
        return await self._request("POST", "/keys", CreatedKey, idempotent=False, body=spec)

    @api_method
    async def revoke(self, key: str) -> KeyView:
        """By key id. All servers refuse the key within a second, permanently."""
        return await self._request("DELETE", url_path("keys", key), KeyView)


class PrincipalsResource(ApiResource[M]):
    @api_method
    async def list(self) -> Sequence[PrincipalView]:
        return await self._list("/principals", PrincipalView)

    @api_method
    async def create(self, name: str, kind: PrincipalKind | str = PrincipalKind.PERSON) -> PrincipalView:
        """Creates a principal without keys; its name can neither be changed nor given to another."""
        spec = PrincipalSpec(name=name, kind=PrincipalKind(str(kind)))
        return await self._request("POST", "/principals", PrincipalView, idempotent=False, body=spec)

    @api_method
    async def disable(self, name: str) -> PrincipalView:
        """All servers refuse its keys within a second, permanently."""
        return await self._request("POST", url_path("principals", name, "disable"), PrincipalView)


def _selection_body(ids: Sequence[int] | None, which: DeadLetterSelection) -> DeadLetterSelector:
    return DeadLetterSelector(ids=None if ids is None else tuple(ids), **which)
