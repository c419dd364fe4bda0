"""Submission on the caller's own connection: the job exists if and only if the caller's transaction commits.

The SDK's `task.on(connection)` calls it. It runs the engine in the caller's process, so it needs `rota[server]`.

The driver is detected by the type of the connection. Blocking connections need the sync facade, async ones the async
calls; a mismatch is refused before anything is written.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

from rota.engine.admission.decision import AdmissionGate
from rota.engine.submission.submitter import submit_on_async, submit_on_sync
from rota.infra.postgres.foreign import is_async
from rota.infra.settings_file import load
from rota.model.errors import InvalidInput
from rota.model.jobs.submission import Submission, SubmitResult
from rota.runtime import build_gate


async def submit(connection: Any, submissions: Sequence[Submission]) -> list[SubmitResult]:
    if not is_async(connection):
        raise InvalidInput(f"A {type(connection).__name__} would block the event loop: use task.sync.on(connection).")
    return await submit_on_async(connection, submissions, gate=_gate())


def submit_sync(connection: Any, submissions: Sequence[Submission]) -> list[SubmitResult]:
    if is_async(connection):
        raise InvalidInput(f"A {type(connection).__name__} must be awaited: use `await task.on(connection)...`.")
    return submit_on_sync(connection, submissions, gate=_gate())


@cache
def _gate() -> AdmissionGate:
    return build_gate(load().settings)
