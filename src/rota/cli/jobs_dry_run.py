"""`rota submit --dry-run`: whether it would be taken, and what would become of it. Changes nothing."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from rota.cli.books_view import Page
from rota.cli.dlq_view import several
from rota.cli.explain import told_live
from rota.cli.jobs_view import needs
from rota.engine.dry_run import DryRun, dry_run
from rota.engine.gate import Verdict
from rota.infra.postgres import Database
from rota.model.job import Submission
from rota.model.job_frames import format_frames
from rota.model.settings import Settings
from rota.runtime import submitter_of


async def rehearsed(settings: Settings, database: Database, given: Submission) -> Page:
    found = await dry_run(database, given, submitter_of(settings, database).gate, may_be_critical=True)
    starts = sum(layer.starts for layer in found.explained.layers)
    data = {
        "already": found.job.id if found.already else None,
        "gate": {"verdict": found.gate.verdict, "reason": found.gate.reason or None},
        "state": found.job.state,
        "frames": sum(layer.frames.count for layer in found.job.layers),
        "starts": starts,
        "explained": msgspec.to_builtins(found.explained),
    }
    return Page(data, [*_lines(found, starts)])


def _lines(found: DryRun, starts: int) -> Iterator[str]:
    job = found.job
    if found.already:
        yield f"Nothing would be submitted: job {job.id} was submitted with this key before, it is {job.state}."
        return
    frames = sum(layer.frames.count for layer in job.layers)
    yield f"{job.name} would be submitted to the show {job.show}, topic {job.topic}: {several(frames, 'frame')}."
    for layer in job.layers:
        spec = f"{layer.frames.count} ({format_frames(layer.frames)})"
        yield f"  {layer.name}: {spec}, {needs(layer)} per frame"
    yield f"  policy: {_GATE[found.gate.verdict]}{f' ({found.gate.reason})' if found.gate.reason else ''}"
    if found.gate.verdict is Verdict.ALLOW:
        yield f"  {several(starts, 'frame')} of {frames} would start now."
    yield from told_live(found.explained, named=len(job.layers) > 1)
    yield "Nothing was changed."


_GATE = {
    Verdict.ALLOW: "allowed",
    Verdict.DENY: "denied",
    Verdict.REQUIRE_APPROVAL: "somebody must approve it",
    Verdict.WAIT: "it waits to be decided about",
}
