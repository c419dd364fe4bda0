"""`rota submit --dry-run`: whether it would be taken, and what would become of it. Changes nothing."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from rota.cli.core.tables import CliPage
from rota.cli.dlq.view import pluralize
from rota.cli.jobs.explain_view import waiting_lines
from rota.cli.jobs.view import resources_text
from rota.engine.admission.decision import AdmissionVerdict
from rota.engine.submission.dry_run import SubmissionDryRun, dry_run
from rota.infra.postgres import Database
from rota.model.jobs.frame_ranges import format_frames
from rota.model.jobs.submission import Submission
from rota.model.settings import Settings
from rota.runtime import build_submitter


async def dry_run_page(settings: Settings, database: Database, given: Submission) -> CliPage:
    found = await dry_run(database, given, build_submitter(settings, database).gate, may_be_critical=True)
    starts = sum(layer.starts for layer in found.explained.layers)
    data = {
        "already": found.job.id if found.already else None,
        "gate": {"verdict": found.gate.verdict, "reason": found.gate.reason or None},
        "state": found.job.state,
        "frames": sum(layer.frames.count for layer in found.job.layers),
        "starts": starts,
        "explained": msgspec.to_builtins(found.explained),
    }
    return CliPage(data, [*_lines(found, starts)])


def _lines(found: SubmissionDryRun, starts: int) -> Iterator[str]:
    job = found.job
    if found.already:
        yield f"Nothing would be submitted: job {job.id} was submitted with this key before, it is {job.state}."
        return
    frames = sum(layer.frames.count for layer in job.layers)
    yield f"{job.name} would be submitted to the show {job.show}, topic {job.topic}: {pluralize(frames, 'frame')}."
    for layer in job.layers:
        spec = f"{layer.frames.count} ({format_frames(layer.frames)})"
        yield f"  {layer.name}: {spec}, {resources_text(layer)} per frame"
    yield f"  policy: {_GATE_TEXT[found.gate.verdict]}{f' ({found.gate.reason})' if found.gate.reason else ''}"
    if found.gate.verdict is AdmissionVerdict.ALLOW:
        yield f"  {pluralize(starts, 'frame')} of {frames} would start now."
    yield from waiting_lines(found.explained, named=len(job.layers) > 1)
    yield "Nothing was changed."


_GATE_TEXT = {
    AdmissionVerdict.ALLOW: "allowed",
    AdmissionVerdict.DENY: "denied",
    AdmissionVerdict.REQUIRE_APPROVAL: "somebody must approve it",
    AdmissionVerdict.WAIT: "it waits to be decided about",
}
