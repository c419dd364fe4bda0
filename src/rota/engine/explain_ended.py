"""How a job ended, and which of its frames failed first. Reads."""

from __future__ import annotations

from collections.abc import Sequence

from rota.engine.explain_policy import why_denied
from rota.engine.explain_told import Explained, FailureTold
from rota.engine.jobs import Job, Layer
from rota.infra.postgres import Database, query
from rota.model.lifecycle import JobState
from rota.model.reasons import Reason

FAILURE = query(__package__, "explain_failure")
LETTER = query(__package__, "explain_letter")


async def how_it_ended(database: Database, job: Job, layers: Sequence[Layer]) -> Explained:
    failure = None if job.state is JobState.SUCCEEDED else await _first_failure(database, layers)
    letter = None if failure or job.state is JobState.SUCCEEDED else await database.row(LETTER, job.id)
    denied = why_denied(job)
    error = letter["error"] if letter is not None and letter["error"] and not denied else ""
    return Explained(
        job=job.id,
        name=job.name,
        show=job.show,
        state=job.state,
        reason=job.reason,
        sentence=f"It has ended as {job.state}{_why(job.reason)}{_first(failure)}{f' ({error})' if error else ''}"
        + denied,
        waiting=0,
        on_workers=0,
        first_failure=failure,
        deadline_at=job.deadline_at,
    )


async def _first_failure(database: Database, layers: Sequence[Layer]) -> FailureTold | None:
    by_id = {layer.id: layer for layer in layers}
    row = await database.row(FAILURE, list(by_id))
    if row is None:
        return None
    layer = by_id[row["layer"]]
    told = {**dict(row.items()), "layer": layer.name, "frame": layer.frames.number(row["frame"])}
    return FailureTold(**told)


def _why(reason: str | None) -> str:
    if reason is None:
        return "."
    meaning = Reason(reason).meaning if reason in set(Reason) else f"{reason}."
    return f": {meaning}"


def _first(failure: FailureTold | None) -> str:
    if failure is None:
        return ""
    why = ": ".join(word for word in (failure.code, failure.error) if word)
    on = f" on {failure.worker}" if failure.worker else ""
    return f" Frame {failure.frame} of {failure.layer} failed first{on}{f' ({why})' if why else ''}."
