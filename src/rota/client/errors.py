"""Maps API errors to the exception with the same code, and parses `Retry-After`. No I/O."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any, Final

import msgspec

from rota.api.submission import SubmitProblem
from rota.infra.telemetry.redaction import redact_text
from rota.model.errors import (
    Forbidden,
    InvalidInput,
    JobNotSucceeded,
    NotFound,
    Refused,
    RotaError,
    RunNotSucceeded,
    Unauthenticated,
    Unavailable,
)

EXCERPT_BYTES_MAX: Final = 200
_BY_STATUS: Final[dict[int, type[RotaError]]] = {401: Unauthenticated, 403: Forbidden, 404: NotFound, 409: Refused}


class ApiProblem(msgspec.Struct):
    """The common part of a problem document (RFC 9457)."""

    code: str
    detail: str
    facts: dict[str, Any] = {}


def error_from_response(status: int, media_type: str, body: bytes) -> RotaError:
    """The exception for an error response."""
    try:
        problem = msgspec.json.decode(body, type=ApiProblem)
    except (msgspec.DecodeError, UnicodeError):
        return _error_class(status)(_unrecognized_answer(status, media_type, body), status=status)
    return error_from_problem(status, problem)


def error_from_problem(status: int, problem: ApiProblem | SubmitProblem) -> RotaError:
    """The exception for a problem document."""
    kind = _BY_CODE.get(problem.code, _error_class(status))
    facts = {name: value for name, value in problem.facts.items() if name.isidentifier() and name != "sentence"}
    error = kind(problem.detail, **{**facts, "status": status})
    if error.code != problem.code:
        error.facts["code"] = problem.code
    return error


def parse_retry_after(retry_after: str, now: datetime | None = None) -> float:
    """Seconds requested by a `Retry-After` header; 0 if it cannot be parsed."""
    try:
        return max(0.0, float(retry_after)) if float(retry_after) < float("inf") else 0.0
    except ValueError:
        pass
    try:
        until = parsedate_to_datetime(retry_after)
    except (TypeError, ValueError):
        return 0.0
    aware = until if until.tzinfo else until.replace(tzinfo=UTC)
    return max(0.0, (aware - (now or datetime.now(UTC))).total_seconds())


def _error_class(status: int) -> type[RotaError]:
    if status in _BY_STATUS:
        return _BY_STATUS[status]
    if status == 429 or status >= 500:
        return Unavailable
    return InvalidInput if status >= 400 else RotaError


def _unrecognized_answer(status: int, media_type: str, body: bytes) -> str:
    text = " ".join(body[:EXCERPT_BYTES_MAX].decode(errors="replace").split())
    excerpt = f": {redact_text(text)}" if text and "html" not in media_type else ""
    return f"The server that answered with status {status} is not Rota: check the URL, and proxies on the way{excerpt}."


def _subclass_tree(kind: type[RotaError]) -> Iterator[type[RotaError]]:
    yield kind
    for subclass in kind.__subclasses__():
        yield from _subclass_tree(subclass)


_BY_CODE: Final = {
    kind.code: kind
    for kind in _subclass_tree(RotaError)
    if not issubclass(kind, (JobNotSucceeded, RunNotSucceeded)) and kind.__module__ == "rota.model.errors"
}
