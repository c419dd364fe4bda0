"""Review of withheld outputs: people inspect, release or redact them.

No frame runs again: a release makes the stored output readable. It is one transaction under the lock of the frame's
end, which also deletes a pending scan, so a concurrent verdict finds it gone and is dropped. The submitter of a job, by
principal or by the actor that the submission names, may not decide about its outputs; without a verified submitter, no
reviewer may. Every decision is audited with its reason, and so is every read of a withheld output. Repeating a decision
changes nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Sequence
from typing import Final, Literal

import msgspec

from rota.engine.completion.job_ends import JobEnd, job_end
from rota.engine.completion.publisher import CompletionPublisher
from rota.engine.outputs import sync_check
from rota.engine.outputs.async_scanner import COUNT_QUARANTINED, RELEASE_DEPENDENTS, StoredFrameOutput, replace_output
from rota.engine.outputs.frame_end_lock import FrameEndKey, lock_frame_ends
from rota.engine.outputs.stored_parts import stored_parts
from rota.engine.outputs.sync_check import OutputStateChange, SyncOutputChecker
from rota.engine.principal_state import check_active
from rota.infra import audit, failpoints
from rota.infra.audit import AuditEntry
from rota.infra.blob_store import BlobStore
from rota.infra.postgres import Database, Record, Transaction, query
from rota.model.artifacts import format_artifact, parse_artifact
from rota.model.errors import Forbidden, InvalidInput, NotFound, Refused
from rota.model.identity.principals import Principal, is_unverified
from rota.model.ids import JobId, ShowId
from rota.model.policy.outputs import (
    OutputCheck,
    OutputEffect,
    OutputMeta,
    OutputPolicyDecision,
    OutputRestriction,
    OutputReviewResult,
    OutputSummary,
    OutputView,
)
from rota.policy.output.evaluate import deadline_after, redact_all
from rota.policy.output.parts import OutputParts
from rota.queue import Queue
from rota.queue.dead_letters import DeadLetterFilter

LIST = query(__package__, "outputs_list")
GET = query(__package__, "outputs_get")
DELETE_SCAN = query(__package__, "outputs_stop")
RELEASE = query(__package__, "outputs_release")
READ = query(__package__, "outputs_read")
DEAD_LETTERS = query(__package__, "outputs_letter")

REASON_MAX: Final = 500
REDACT_TIMEOUT_S: Final = 30.0
TOKEN_MAX: Final = 2**63 - 1
ReviewState = Literal["held", "quarantined", "redacted", "released"]
_META = msgspec.msgpack.Decoder(OutputMeta)
_CHECKS = msgspec.json.Decoder(list[OutputCheck])


class OutputReviewer(msgspec.Struct, frozen=True):
    """A principal who decides about outputs, with the name for the audit trail."""

    audited: str
    principal: Principal


class OutputReview:
    def __init__(self, database: Database, store: BlobStore, queue: Queue, publisher: CompletionPublisher) -> None:
        self.database = database
        self.store = store
        self.queue = queue
        self._publisher = publisher

    async def page(
        self,
        *,
        shows: Collection[ShowId] | None = None,
        state: ReviewState | None = None,
        job: JobId | None = None,
        after: int | None = None,
        most: int = 50,
    ) -> list[OutputSummary]:
        """Newest first; `after` is the last output of the previous page."""
        within_shows = None if shows is None else sorted(shows)
        before = TOKEN_MAX if after is None else after
        return [_output_summary(row) for row in await self.database.rows(LIST, within_shows, state, job, before, most)]

    async def get(self, output: int) -> OutputView:
        row = await self._row(output)
        checks = _CHECKS.decode(row["checks"]) if row["checks"] else []
        files = [name for _, name in map(parse_artifact, row["artifacts"] or ())]
        return OutputView(line=_output_summary(row), checks=checks, artifacts=files)

    async def content(self, output: int, audited: str, part: str = "value") -> bytes:
        """The original output, even if redacted or withheld: its value as msgpack, or with `artifact:NAME` a file."""
        content = await self.locate_content(output, audited, part)
        return content if isinstance(content, bytes) else await self.store.get(content)

    async def locate_content(self, output: int, audited: str, part: str = "value") -> bytes | str:
        """The same, or a pointer to it; the access is recorded."""
        row = await self._row(output)
        pointers = _pointers(row)
        if part != "value" and part not in pointers:
            raise NotFound(
                f"Output {output} has no part {part[:64]!r}: it has value, and {', '.join(pointers) or 'no file'}."
            )
        detail = {"show": str(row["pk_show"]), "output": output, "part": part}
        entry = AuditEntry(audited, "output.read", f"job:{row['job']}", detail)
        async with self.database.transaction() as tx:
            await audit.append(tx, [entry])
        if part == "value" and part not in pointers:
            return bytes(row["value"]) if row["value"] else msgspec.msgpack.encode(None)
        return pointers[part]

    async def release(self, output: int, who: OutputReviewer, reason: str) -> OutputReviewResult:
        """Make the output readable as the frame left it."""
        row = await self._reviewable_row(output, who, reason)
        ended: list[JobEnd] = []
        async with self.database.transaction() as tx:
            await check_active(tx, who.principal)
            mode = await tx.value(DELETE_SCAN, output)
            failpoints.hit("outputs.after_stop")
            now = await _locked_end(tx, row)
            if now is None or now["output"] is None:
                return _review_result(row, "released", changed=False)
            # It may have been redacted since the first read: only a new read has the pointers to the original.
            current = await tx.row(GET, output) if now["output"] == OutputRestriction.REDACTED else None
            pointers = _pointers(current) if current is not None else None
            files = [
                format_artifact(at, name.removeprefix("artifact:"))
                for name, at in (pointers or {}).items()
                if name != "value"
            ]
            check = _encoded_check(who, "RELEASED", reason)
            at = pointers.get("value") if pointers is not None else None
            await tx.run(RELEASE, *_frame_key(row), at, pointers is not None, "\n".join(files), check)
            change = _state_change(row, "released", reason)
            await sync_check.write_state_changes(tx, [change], [row["ts_ended"]])
            ended = await self._restore_success(tx, row, now["state"])
            await self._release_and_audit(tx, row, who, "output.release", reason, held=mode is not None)
        self._notify(ended)
        return _review_result(row, "released", changed=True)

    async def redact(self, output: int, who: OutputReviewer, reason: str, *, whole: bool = False) -> OutputReviewResult:
        """Make it readable without the findings of the scanners; with `whole`, or without findings, nothing remains."""
        row = await self._reviewable_row(output, who, reason)
        if row["state"] == "released":
            raise Refused(f"Output {output} was released and is readable: it cannot be redacted any more.")
        original = await self._original(row)
        redacted, findings = await asyncio.to_thread(
            redact_all, original, deadline_after(REDACT_TIMEOUT_S), whole=whole
        )
        decision = OutputPolicyDecision(says=OutputEffect.REDACT, reason=reason, findings=tuple(findings))
        ended: list[JobEnd] = []
        async with self.database.transaction(idle_s=self.database.target.idle_in_transaction_s) as tx:
            await check_active(tx, who.principal)
            mode = await tx.value(DELETE_SCAN, output)
            now = await _locked_end(tx, row)
            if now is None or now["output"] not in (OutputRestriction.HELD, OutputRestriction.QUARANTINED):
                return _review_result(row, "redacted", changed=False)
            stored = StoredFrameOutput(now["value"], now["value_at"], now["artifacts"])
            check = _review_check(who, decision)
            pointers = await replace_output(tx, self.store, _frame_key(row), stored, original, redacted, check)
            change = _state_change(row, OutputRestriction.REDACTED, reason)._replace(original=pointers or "")
            await sync_check.write_state_changes(tx, [change], [row["ts_ended"]])
            ended = await self._restore_success(tx, row, now["state"])
            await self._release_and_audit(tx, row, who, "output.redact", reason, held=mode is not None)
        self._notify(ended)
        return _review_result(row, "redacted", changed=True)

    async def _row(self, output: int) -> Record:
        row = await self.database.row(GET, output) if 0 <= output <= TOKEN_MAX else None
        if row is None:
            raise self.not_found(output)
        return row

    @staticmethod
    def not_found(output: int) -> NotFound:
        return NotFound(f"Output {output} is not withheld, or is no longer retained: see `rota outputs list`.")

    async def _reviewable_row(self, output: int, who: OutputReviewer, reason: str) -> Record:
        if not reason.strip() or len(reason) > REASON_MAX or "\0" in reason:
            raise InvalidInput(f"A reason is required for the audit trail: give 1 to {REASON_MAX} characters.")
        row = await self._row(output)
        forbid_self_review(_META.decode(row["meta"]), who)
        return row

    async def _original(self, row: Record) -> OutputParts:
        pointers = _pointers(row)
        files = [(name.removeprefix("artifact:"), at) for name, at in pointers.items() if name != "value"]
        value = None if "value" in pointers else row["value"]
        return await stored_parts(self.store, value, pointers.get("value"), files)

    async def _restore_success(self, tx: Transaction, row: Record, state: str) -> list[JobEnd]:
        """The frame succeeds again, and so does its job if no other frame is quarantined."""
        if state != "OUTPUT_QUARANTINED":
            return []
        rows = await tx.rows(COUNT_QUARANTINED, [row["pk_layer"]], [row["job"]], [-1], None)
        dead_letters = [each["id"] for each in await tx.rows(DEAD_LETTERS, sync_check.dead_letter_cause(row["id"]))]
        if dead_letters:
            await self.queue.dead_letters.purge(DeadLetterFilter(ids=dead_letters), on=tx)
        return [job_end(each) for each in rows]

    async def _release_and_audit(
        self, tx: Transaction, row: Record, who: OutputReviewer, act: str, reason: str, *, held: bool
    ) -> None:
        if held:
            await tx.run(RELEASE_DEPENDENTS, [row["job"]])
        detail = {"show": str(row["pk_show"]), "output": row["id"], "reason": reason, "was": row["state"]}
        await audit.append(tx, [AuditEntry(who.audited, act, f"job:{row['job']}", detail)])
        failpoints.hit("outputs.before_release_commit")

    def _notify(self, ended: Sequence[JobEnd]) -> None:
        if ended:
            self._publisher.publish_ends(ended)


def forbid_self_review(meta: OutputMeta, who: OutputReviewer) -> None:
    name, submitters = who.principal.name, {name for name in (meta.principal, meta.actor_id) if name}
    if is_unverified(name):
        raise Forbidden(
            f"{name} is not a principal: decide about outputs with a key, through the API or `rota outputs`.",
            reason="unverified",
        )
    if is_unverified(meta.principal):
        raise Forbidden(
            f"{meta.principal} submitted the job without a key, so that {name} may be the submitter: submit it or"
            " retry it with a key.",
            reason="self_release",
        )
    if not submitters.isdisjoint(who.principal.names):
        raise Forbidden(
            "The submitter of a job may not decide about its outputs: ask another reviewer.",
            reason="self_release",
        )


async def _locked_end(tx: Transaction, row: Record) -> Record | None:
    """The end of the frame, locked; None: it is no longer retained."""
    await lock_frame_ends(tx, [_frame_key(row)])
    return await tx.row(READ, *_frame_key(row))


def _frame_key(row: Record) -> FrameEndKey:
    return row["pk_layer"], row["frame"], row["id"], row["ts_ended"]


def _pointers(row: Record) -> dict[str, str]:
    """Pointers to the original output by part name; a small value has none, since it is in the row itself."""
    if row["original"]:
        return {name: pointer for pointer, name in map(parse_artifact, row["original"])}
    pointers = {f"artifact:{name}": pointer for pointer, name in map(parse_artifact, row["artifacts"] or ())}
    return {"value": row["value_at"], **pointers} if row["value_at"] else pointers


def _output_summary(row: Record) -> OutputSummary:
    meta = _META.decode(row["meta"])
    return OutputSummary(
        id=row["id"],
        job=JobId(row["job"]),
        show=row["show"],
        topic=meta.topic,
        layer=meta.layer,
        frame=meta.number,
        attempt=meta.attempt,
        state=row["state"],
        severity=row["severity"],
        rule=row["rule"],
        reason=row["reason"],
        bytes=meta.bytes,
        at=row["at"],
    )


def _state_change(row: Record, state: str, reason: str) -> OutputStateChange:
    decision = OutputPolicyDecision(
        says=OutputEffect.ALLOW, rule=row["rule"], reason=reason, severity=row["severity"] or "medium"
    )
    meta = _META.decode(row["meta"])
    return OutputStateChange(
        row["id"], row["pk_layer"], row["frame"], row["job"], row["pk_show"], state, decision, meta
    )


def _encoded_check(who: OutputReviewer, effect: str, reason: str) -> str:
    decision = OutputPolicyDecision(says=OutputEffect.ALLOW, reason=reason)
    return msgspec.json.encode(msgspec.structs.replace(_review_check(who, decision), says=effect)).decode()


def _review_check(who: OutputReviewer, decision: OutputPolicyDecision) -> OutputCheck:
    return SyncOutputChecker(lambda: None, who.audited).check_record("person", decision)


def _review_result(row: Record, state: str, *, changed: bool) -> OutputReviewResult:
    return OutputReviewResult(id=row["id"], job=JobId(row["job"]), state=state, changed=changed)
