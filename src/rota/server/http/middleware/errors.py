"""Exceptions of handlers, and of Litestar before it calls one, as problem documents."""

from __future__ import annotations

from typing import Any, Final

from litestar import Request, Response
from litestar.exceptions import HTTPException, ValidationException

from rota.model.errors import InvalidInput, RotaError
from rota.server.http.problem_details import (
    MEDIA_TYPE,
    ProblemResponse,
    problem_response,
    response_for_defect,
    response_for_error,
)

_CODE_BY_STATUS: Final = {
    404: "not_found",
    405: "method_not_allowed",
    408: "too_slow",
    413: "too_large",
    415: "unsupported_media_type",
}

BODY_PARAMETER: Final = "data"
"""The parameter name that handlers use."""


def handle_rota_error(_request: Request[Any, Any, Any], error: RotaError) -> Response[bytes]:
    return _response(response_for_error(error))


def handle_http_exception(_request: Request[Any, Any, Any], error: HTTPException) -> Response[bytes]:
    return _response(problem_for_http(error))


def handle_defect(_request: Request[Any, Any, Any], error: Exception) -> Response[bytes]:
    return _response(response_for_defect(error))


def _response(answer: ProblemResponse) -> Response[bytes]:
    return Response(answer.body, status_code=answer.problem.status, media_type=MEDIA_TYPE, headers=answer.headers)


def problem_for_http(error: HTTPException) -> ProblemResponse:
    """For a request that Litestar refuses before it calls a handler."""
    if error.status_code >= 500:
        return response_for_defect(error)
    code = _CODE_BY_STATUS.get(error.status_code, InvalidInput.code)
    headers = dict(error.headers or {})
    if "allow" in headers:
        headers["allow"] = _allowed_methods(headers["allow"])
    return problem_response(error.status_code, code, _sentence(error), headers)


def _allowed_methods(methods_header: str) -> str:
    """Correct Litestar's list: the middleware accepts HEAD for GET, and OPTIONS is not served."""
    methods = set(methods_header.split(", ")) - {"OPTIONS"}
    return ", ".join(sorted(methods | {"HEAD"} if "GET" in methods else methods))


def _sentence(error: HTTPException) -> str:
    if isinstance(error, ValidationException) and isinstance(error.extra, list) and error.extra:
        first = error.extra[0]
        if first.get("key") == BODY_PARAMETER:
            return "The request has no body: see /api/v1/openapi.json for what this call takes."
        where = f" {first['key']}" if first.get("key") else ""
        message = first.get("message", "it has the wrong type").replace("`", "")
        return f"The parameter{where} cannot be read: {message[0].lower()}{message[1:].rstrip('.')}."
    if error.status_code == 404:
        return "This path does not exist: see /api/v1/openapi.json for the paths."
    if error.status_code == 405:
        return "This path does not support that method: see /api/v1/openapi.json for its methods."
    return f"{error.detail.rstrip('.')}."
