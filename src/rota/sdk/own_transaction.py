"""Submission on the caller's own connection, by `rota.transactional`.

That module runs the engine, which is above the SDK and needs the packages of a server. It is imported by name, so that
nothing that imports the SDK depends on it: only a caller that passes a connection does.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

from rota.infra.extras import needs_extra

if TYPE_CHECKING:
    from rota.model.jobs.submission import Submission, SubmitResult


async def submit(connection: Any, submissions: Sequence[Submission]) -> list[SubmitResult]:
    """Raises ExtraMissing where the packages of a server are not installed."""
    submitted: list[SubmitResult] = await _transactional().submit(connection, submissions)
    return submitted


def submit_sync(connection: Any, submissions: Sequence[Submission]) -> list[SubmitResult]:
    submitted: list[SubmitResult] = _transactional().submit_sync(connection, submissions)
    return submitted


def _transactional() -> ModuleType:
    with needs_extra("server", "Submitting in your own transaction"):
        return import_module("rota.transactional")
