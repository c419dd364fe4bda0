"""`rota submit --dry-run`: whether the submission would be accepted, and what would happen to it. Changes nothing."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import msgspec

from rota.cli.core.tables import CliPage
from rota.cli.dlq.view import pluralize
from rota.cli.jobs.explain_view import waiting_lines
from rota.cli.jobs.view import resources_text
from rota.engine.admission.decision import AdmissionVerdict
from rota.engine.admission.policy_queries import policy_preview
from rota.engine.submission.dry_run import SubmissionDryRun, dry_run
from rota.infra.postgres import Database
from rota.model.jobs.frame_ranges import format_frames
from rota.model.jobs.submission import Submission
from rota.model.settings import Settings
from rota.policy import factory


async def dry_run_page(settings: Settings, database: Database, submission: Submission) -> CliPage:
    kernel = factory.open_kernel(settings, None)
    try:
        # Without a policy here, PostgreSQL says whether the job would wait for the servers' decision.
        preview = policy_preview(settings, kernel, asks=False) if kernel is not None else None
        result = await dry_run(database, submission, preview, may_be_critical=True)
    finally:
        if kernel is not None:
            await kernel.close()
    starts = sum(layer.starts for layer in result.explained.layers)
    data = {
        "already": result.job.id if result.already else None,
        "gate": {
            "verdict": result.gate.verdict,
            "reason": result.gate.reason or None,
            "because": result.gate.because or None,
        },
        "state": result.job.state,
        "frames": sum(layer.frames.count for layer in result.job.layers),
        "starts": starts,
        "explained": msgspec.to_builtins(result.explained),
    }
    return CliPage(data, [*_lines(result, starts)])


def _lines(result: SubmissionDryRun, starts: int) -> Iterator[str]:
    job = result.job
    if result.already:
        yield f"Nothing would be submitted: job {job.id} already has this key, and it is {job.state}."
        return
    frames = sum(layer.frames.count for layer in job.layers)
    yield f"{job.name} would be submitted to the show {job.show}, topic {job.topic}: {pluralize(frames, 'frame')}."
    for layer in job.layers:
        spec = f"{layer.frames.count} ({format_frames(layer.frames)})"
        yield f"  {layer.name}: {spec}, {resources_text(layer)} per frame"
    why = result.gate.because or result.gate.reason
    yield f"  policy: {VERDICT_TEXT[result.gate.verdict]}{f' ({why})' if why else ''}"
    if result.gate.verdict is AdmissionVerdict.ALLOW:
        yield f"  {pluralize(starts, 'frame')} of {frames} would start now."
    if job.state.terminal:
        yield f"  It would end as {job.state} and run nothing."
    else:
        yield from waiting_lines(result.explained, named=len(job.layers) > 1)
    yield "Nothing was changed."


VERDICT_TEXT: Final = {
    AdmissionVerdict.ALLOW: "allowed",
    AdmissionVerdict.DENY: "denied",
    AdmissionVerdict.REQUIRE_APPROVAL: "approval required",
    AdmissionVerdict.WAIT: "decision pending",
}
