"""Errors as problem documents (RFC 9457): one sentence and the stable code that logs use too."""

from __future__ import annotations

from http import HTTPStatus
from typing import Any, Final

import msgspec
import structlog

from rota.infra.service.listener import Send
from rota.infra.telemetry import metrics
from rota.model.errors import (
    BlobMissing,
    Forbidden,
    InvalidInput,
    NotFound,
    RateLimited,
    Refused,
    RotaError,
    SetupFailed,
    TooLarge,
    Unauthenticated,
    Unavailable,
)

log = structlog.get_logger(__name__)
REFUSED = metrics.counter("rota_http_refusals", "Requests that were refused, by code.", labels=("code",))
DEFECTS = metrics.counter("rota_http_defects", "Requests that failed because of a defect in Rota.")

MEDIA_TYPE: Final = "application/problem+json"
RETRY_AFTER_S: Final = 1
# The first match wins, so subclasses come before their bases.
STATUS_BY_ERROR: Final[tuple[tuple[type[RotaError], int], ...]] = (
    (Unauthenticated, 401),
    (Forbidden, 403),
    (NotFound, 404),
    (BlobMissing, 404),
    (TooLarge, 413),
    (InvalidInput, 400),
    (RateLimited, 429),
    (Refused, 409),
    (SetupFailed, 409),
    (Unavailable, 503),
)
_DEFECT_DETAIL: Final = (
    "An unexpected error occurred and is in the server's log: try again, and report it to the operator."
)


class ProblemDetails(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The body of an error response."""

    status: int
    title: str
    code: str
    """Stable, for programs."""
    detail: str
    """One sentence that says what to do, for people."""
    facts: dict[str, Any] = {}
    type: str = "about:blank"


class ProblemResponse(msgspec.Struct, frozen=True):
    problem: ProblemDetails
    headers: dict[str, str] = {}

    @property
    def body(self) -> bytes:
        return msgspec.json.encode(self.problem)


def response_for_error(error: RotaError) -> ProblemResponse:
    status = next((status for kind, status in STATUS_BY_ERROR if isinstance(error, kind)), 500)
    if status == 500:
        return response_for_defect(error)
    headers = {}
    if status in (429, 503):
        headers["retry-after"] = str(error.facts.get("retry_after_s", RETRY_AFTER_S))
    if status == 401:
        headers["www-authenticate"] = "Bearer"
    facts = {name: value for name, value in error.facts.items() if _is_encodable(value)}
    return problem_response(status, error.code, error.sentence, headers, facts)


def response_for_defect(error: BaseException) -> ProblemResponse:
    """An unexpected error. Its text may hold secrets, so it goes to the log only."""
    DEFECTS.inc()
    log.error("http_defect", exc_info=error)
    return problem_response(500, "defect", _DEFECT_DETAIL, {})


def problem_response(
    status: int, code: str, detail: str, headers: dict[str, str], facts: dict[str, Any] | None = None
) -> ProblemResponse:
    REFUSED.labels(code).inc()
    title = HTTPStatus(status).phrase
    return ProblemResponse(
        ProblemDetails(status=status, title=title, code=code, detail=detail, facts=facts or {}), headers
    )


def _is_encodable(value: object) -> bool:
    return value is None or isinstance(value, str | int | float | bool | list | tuple | dict)


async def send_problem(send: Send, answer: ProblemResponse) -> None:
    """As the only response of a request that Litestar does not answer."""
    headers = {"content-type": MEDIA_TYPE, "content-length": str(len(answer.body)), **answer.headers}
    await send(
        {
            "type": "http.response.start",
            "status": answer.problem.status,
            "headers": [(name.encode(), value.encode()) for name, value in headers.items()],
        }
    )
    await send({"type": "http.response.body", "body": answer.body})
