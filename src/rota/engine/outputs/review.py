"""What people do with outputs that the policy keeps back: look at them, release them, have them redacted.

Nothing runs again: a release lets out what the frame left. It is one transaction under the lock of the frame's end,
which also removes the scan, if there is one: a verdict that is under way finds it gone and is dropped. Who submitted
the job may not decide about its outputs, by key or by the actor that the submission names. Every act is in the audit
trail with its reason, and so is every look at what is kept back. Doing it again changes nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Sequence
from datetime import datetime
from typing import Final, Literal

import msgspec

from rota.engine.completion.finisher import Finisher, JobEnd, job_end
from rota.engine.outputs import sync_check
from rota.engine.outputs.async_scanner import COUNT_QUARANTINED, RELEASE_DEPENDENTS, StoredFrameOutput, replace_output
from rota.engine.outputs.sync_check import OutputStateChange, SyncOutputChecker
from rota.infra import audit, failpoints
from rota.infra.audit import AuditEntry
from rota.infra.blob_store import BlobStore
from rota.infra.postgres import Database, Record, Transaction, query
from rota.model.artifacts import format_artifact, parse_artifact
from rota.model.errors import Forbidden, InvalidInput, NotFound, Refused
from rota.model.ids import JobId, LayerId, ShowId
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
from rota.policy.output.evaluate import OutputContent, deadline_after, redact_all
from rota.queue import Queue
from rota.queue.dead_letters import DeadLetterFilter

LIST = query(__package__, "outputs_list")
GET = query(__package__, "outputs_get")
DELETE_SCAN = query(__package__, "outputs_stop")
RELEASE = query(__package__, "outputs_release")
LOCK = query(__package__, "outputs_lock")
DEAD_LETTERS = query(__package__, "outputs_letter")

REASON_MAX: Final = 500
REDACT_TIMEOUT_S: Final = 30.0
TOKEN_MAX: Final = 2**63 - 1
ReviewState = Literal["held", "quarantined", "redacted", "released"]
_META = msgspec.msgpack.Decoder(OutputMeta)
_CHECKS = msgspec.json.Decoder(list[OutputCheck])


class OutputReviewer(msgspec.Struct, frozen=True):
    """Who decides: as the audit trail names them, and all that a submission may name them by."""

    audited: str
    names: tuple[str, ...]


class OutputReview:
    def __init__(self, database: Database, store: BlobStore, queue: Queue, finisher: Finisher | None = None) -> None:
        self.database = database
        self.store = store
        self.queue = queue
        self.finisher = finisher
        """Whose listeners hear of jobs that come into another state; None: nobody does."""

    async def page(
        self,
        *,
        shows: Collection[ShowId] | None = None,
        state: ReviewState | None = None,
        job: JobId | None = None,
        after: int | None = None,
        most: int = 50,
    ) -> list[OutputSummary]:
        """The newest first; `after` is the last one of the page before."""
        within_shows = None if shows is None else sorted(shows)
        before = TOKEN_MAX if after is None else after
        return [_output_summary(row) for row in await self.database.rows(LIST, within_shows, state, job, before, most)]

    async def get(self, output: int) -> OutputView:
        row = await self._row(output)
        checks = _CHECKS.decode(row["checks"]) if row["checks"] else []
        files = [name for _, name in map(parse_artifact, row["artifacts"] or ())]
        return OutputView(line=_output_summary(row), checks=checks, artifacts=files)

    async def content(self, output: int, who: OutputReviewer, part: str = "value") -> bytes:
        """What the frame left, whatever readers get: its value as msgpack, or with `artifact:NAME` a file."""
        row = await self._row(output)
        words = _pointers(row)
        if part != "value" and part not in words:
            raise NotFound(
                f"Output {output} has no part {part[:64]!r}: it has value, and {', '.join(words) or 'no file'}."
            )
        detail = {"show": str(row["pk_show"]), "output": output, "part": part}
        entry = AuditEntry(who.audited, "output.read", f"job:{row['job']}", detail)
        async with self.database.transaction() as tx:
            await audit.append(tx, [entry])
        if part == "value" and part not in words:
            return row["value"] or msgspec.msgpack.encode(None)
        return await self.store.get(words[part])

    async def release(self, output: int, who: OutputReviewer, reason: str) -> OutputReviewResult:
        """Let it be read as the frame left it."""
        row = await self._reviewable_row(output, who, reason)
        ended: list[JobEnd] = []
        async with self.database.transaction() as tx:
            mode = await tx.value(DELETE_SCAN, output)
            failpoints.hit("outputs.after_stop")
            now = await tx.row(LOCK, *_frame_key(row))
            if now is None or now["output"] is None:
                return _review_result(row, "released", changed=False)
            # What was redacted since the row was read is known by pointers that only the row of now has.
            fresh = await tx.row(GET, output) if now["output"] == OutputRestriction.REDACTED else None
            words = _pointers(fresh) if fresh is not None else None
            files = [
                format_artifact(at, name.removeprefix("artifact:"))
                for name, at in (words or {}).items()
                if name != "value"
            ]
            check = _encoded_check(who, "RELEASED", reason)
            at = words.get("value") if words is not None else None
            await tx.run(RELEASE, *_frame_key(row), at, words is not None, "\n".join(files), check)
            mark = _state_change(row, "released", reason)
            await sync_check.write_state_changes(tx, [mark], [row["ts_ended"]])
            ended = await self._restore_success(tx, row, now["state"])
            await self._release_and_audit(tx, row, who, "output.release", reason, held=mode is not None)
        self._notify(ended)
        return _review_result(row, "released", changed=True)

    async def redact(self, output: int, who: OutputReviewer, reason: str, *, whole: bool = False) -> OutputReviewResult:
        """Let it be read without what scanners find in it; with `whole`, or if they find nothing, without any of it."""
        row = await self._reviewable_row(output, who, reason)
        if row["state"] == "released":
            raise Refused(f"Output {output} was released: it is for everybody to read already.")
        original = await self._original(row)
        redacted, findings = await asyncio.to_thread(
            redact_all, original, deadline_after(REDACT_TIMEOUT_S), whole=whole
        )
        found = OutputPolicyDecision(says=OutputEffect.REDACT, reason=reason, findings=tuple(findings))
        ended: list[JobEnd] = []
        async with self.database.transaction() as tx:
            mode = await tx.value(DELETE_SCAN, output)
            now = await tx.row(LOCK, *_frame_key(row))
            if now is None or now["output"] not in (OutputRestriction.HELD, OutputRestriction.QUARANTINED):
                return _review_result(row, "redacted", changed=False)
            left = StoredFrameOutput(now["value"], now["value_at"], now["artifacts"])
            check = _review_check(who, found)
            words = await replace_output(tx, self.store, _frame_key(row), left, original, redacted, check)
            mark = _state_change(row, OutputRestriction.REDACTED, reason)._replace(original=words or "")
            await sync_check.write_state_changes(tx, [mark], [row["ts_ended"]])
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
        return NotFound(f"No output {output} is kept back, or it is not kept any more: see `rota outputs list`.")

    async def _reviewable_row(self, output: int, who: OutputReviewer, reason: str) -> Record:
        if not reason.strip() or len(reason) > REASON_MAX or "\0" in reason:
            raise InvalidInput(f"Say why, in 1 to {REASON_MAX} characters: it is kept in the audit trail.")
        row = await self._row(output)
        forbid_self_review(_META.decode(row["meta"]), who)
        return row

    async def _original(self, row: Record) -> OutputContent:
        words = _pointers(row)
        value: bytes | None = row["value"]
        if "value" in words:
            value = await self.store.get(words["value"])
        names = [name for name in words if name != "value"]
        files = [(name.removeprefix("artifact:"), await self.store.get(words[name])) for name in names]
        return OutputContent(value, tuple(files))

    async def _restore_success(self, tx: Transaction, row: Record, state: str) -> list[JobEnd]:
        """The frame succeeds again; its job, too, when it was the last that did not."""
        if state != "OUTPUT_QUARANTINED":
            return []
        rows = await tx.rows(COUNT_QUARANTINED, [row["pk_layer"]], [row["job"]], [-1], None)
        letters = [each["id"] for each in await tx.rows(DEAD_LETTERS, sync_check.dead_letter_cause(row["id"]))]
        if letters:
            await self.queue.dead_letters.purge(DeadLetterFilter(ids=letters), on=tx)
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
        if ended and self.finisher is not None:
            for listener in self.finisher.listeners:
                listener(ended)


def forbid_self_review(meta: OutputMeta, who: OutputReviewer) -> None:
    own = {name for name in (meta.principal, meta.actor_id) if name}
    if not own.isdisjoint(who.names):
        raise Forbidden(
            "Who submitted a job may not decide about its outputs: have somebody else look at it.",
            reason="self_release",
        )


def _frame_key(row: Record) -> tuple[LayerId, int, int, datetime]:
    return row["pk_layer"], row["frame"], row["id"], row["ts_ended"]


def _pointers(row: Record) -> dict[str, str]:
    """Pointers to what the frame left, by the name of the part; a small value has none, it lies in the row itself."""
    if row["original"]:
        return {name: pointer for pointer, name in map(parse_artifact, row["original"])}
    words = {f"artifact:{name}": pointer for pointer, name in map(parse_artifact, row["artifacts"] or ())}
    return {"value": row["value_at"], **words} if row["value_at"] else words


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
    word_said = OutputPolicyDecision(
        says=OutputEffect.ALLOW, rule=row["rule"], reason=reason, severity=row["severity"] or "medium"
    )
    meta = _META.decode(row["meta"])
    return OutputStateChange(
        row["id"], row["pk_layer"], row["frame"], row["job"], row["pk_show"], state, word_said, meta
    )


def _encoded_check(who: OutputReviewer, says: str, reason: str) -> str:
    word_said = OutputPolicyDecision(says=OutputEffect.ALLOW, reason=reason)
    return msgspec.json.encode(msgspec.structs.replace(_review_check(who, word_said), says=says)).decode()


def _review_check(who: OutputReviewer, said: OutputPolicyDecision) -> OutputCheck:
    return SyncOutputChecker(lambda: None, who.audited).check_record("person", said)


def _review_result(row: Record, state: str, *, changed: bool) -> OutputReviewResult:
    return OutputReviewResult(id=row["id"], job=JobId(row["job"]), state=state, changed=changed)
