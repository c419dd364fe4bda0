"""Many submissions in one request: all or none, or each with an answer of its own. No I/O."""

from __future__ import annotations

from typing import Annotated, Any, Final

import msgspec

from rota.model.jobs.submission import Submission, SubmitResult

SUBMIT_BATCH_MAX: Final = 1000
"""Submissions per request."""


class BulkSubmitReply(msgspec.Struct, frozen=True):
    """Results in the order of the submissions."""

    items: list[SubmitResult]


class SubmitBatchItem(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    submission: Submission
    trace: str = ""
    """The traceparent of its submitter; empty if it is not traced."""


class SubmitBatchRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    items: Annotated[list[SubmitBatchItem], msgspec.Meta(min_length=1, max_length=SUBMIT_BATCH_MAX)]


class SubmitProblem(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The error response that the submission would have got in a request of its own."""

    status: int
    code: str
    detail: str
    facts: dict[str, Any] = {}
    retry_after_s: float = 0.0
    """The `Retry-After` of that response; 0: none."""


class SubmitBatchAnswer(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Either `result` or `problem`."""

    result: SubmitResult | None = None
    problem: SubmitProblem | None = None


class SubmitBatchReply(msgspec.Struct, frozen=True):
    """Answers in the order of the items."""

    items: list[SubmitBatchAnswer]
