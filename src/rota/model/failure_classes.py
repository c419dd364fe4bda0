"""Classifies exceptions; the class decides when an agent runs again. Pure: inspects the exception only.

The chain of causes is walked from the raised exception to the root cause, exception groups included; the first
exception that can be classified decides. HTTP clients are recognised by the attributes of their errors, not by class,
so that none must be installed: httpx and requests (`response.status_code`), aiohttp (`status`), botocore (`response` as
a dict with the service's own code), grpc (`code()`).
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator, Mapping
from enum import StrEnum
from typing import Any, Final

CHAIN_MAX: Final = 32


class FailureClass(StrEnum):
    PERMANENT_FORBIDDEN = "PERMANENT_FORBIDDEN"
    THROTTLED = "THROTTLED"
    TRANSIENT = "TRANSIENT"
    SERVER_ERROR = "SERVER_ERROR"
    UNKNOWN = "UNKNOWN"


ClassifyHook = Callable[[BaseException], "FailureClass | str | None"]
"""A user's own classification of an exception; None leaves it to Rota."""

_FORBIDDEN_WORDS: Final = ("accessdenied", "access denied", "unauthorizedoperation", "permissiondenied")
_THROTTLED_CODES: Final = (
    *("throttl", "toomanyrequests", "requestlimitexceeded", "slowdown"),
    *("provisionedthroughputexceeded", "limitexceeded"),
)
_THROTTLED_WORDS: Final = ("throttl", "rate exceeded", "rate limit", "too many requests")
_GRPC: Final = {
    "PERMISSION_DENIED": FailureClass.PERMANENT_FORBIDDEN,
    "RESOURCE_EXHAUSTED": FailureClass.THROTTLED,
    "UNAVAILABLE": FailureClass.TRANSIENT,
    "DEADLINE_EXCEEDED": FailureClass.TRANSIENT,
    "ABORTED": FailureClass.TRANSIENT,
    "INTERNAL": FailureClass.SERVER_ERROR,
    "DATA_LOSS": FailureClass.SERVER_ERROR,
    "UNKNOWN": FailureClass.SERVER_ERROR,
}
_TRANSIENT_NAMES: Final = frozenset(
    {
        *("TransportError", "ConnectError", "ConnectTimeout", "ReadTimeout", "ReadError", "WriteError", "PoolTimeout"),
        *("RemoteProtocolError", "ClientConnectionError", "ServerTimeoutError", "EndpointConnectionError"),
        *("ConnectionClosedError", "InterfaceError", "OperationalError"),
    }
)
_PERMANENT_ERRNOS: Final = frozenset(
    {errno.ENOENT, errno.EACCES, errno.EPERM, errno.EEXIST, errno.EISDIR, errno.ENOTDIR}
)
"""OSErrors about files rather than connections: waiting does not help."""


def classify(error: BaseException, hook: ClassifyHook | None = None) -> FailureClass:
    """The class of `error`. A hook that raises or returns an unknown value is ignored."""
    if hook is not None and (by_hook := _call_hook(hook, error)) is not None:
        return by_hook
    for each in exception_chain(error):
        found = _classify_one(each)
        if found is not None:
            return found
    return FailureClass.UNKNOWN


def exception_chain(error: BaseException) -> Iterator[BaseException]:
    """The exception and its causes in the order a traceback shows them, each once."""
    pending, visited = [error], set[int]()
    while pending and len(visited) < CHAIN_MAX:
        each = pending.pop(0)
        if id(each) in visited:
            continue
        visited.add(id(each))
        yield each
        if isinstance(each, BaseExceptionGroup):
            pending.extend(each.exceptions)
        cause = each.__cause__ or (None if each.__suppress_context__ else each.__context__)
        if cause is not None:
            pending.append(cause)


def _call_hook(hook: ClassifyHook, error: BaseException) -> FailureClass | None:
    try:
        answer = hook(error)
        return None if answer is None else FailureClass(answer)
    except Exception:  # noqa: BLE001 - a broken hook must not hide the original failure
        return None


def _classify_one(error: BaseException) -> FailureClass | None:
    if isinstance(error, MemoryError):
        return FailureClass.THROTTLED
    known = _by_code(_service_code(error)) or _by_status(_status(error)) or _by_grpc(error)
    if known is not None:
        return known
    if isinstance(error, TimeoutError | ConnectionError) or _is_transient(error):
        return FailureClass.TRANSIENT
    return _by_message(error)


def _by_code(code: str) -> FailureClass | None:
    lowered = code.lower()
    if any(word in lowered for word in _THROTTLED_CODES):
        return FailureClass.THROTTLED
    return FailureClass.PERMANENT_FORBIDDEN if any(word in lowered for word in _FORBIDDEN_WORDS) else None


def _by_status(status: int | None) -> FailureClass | None:
    match status:
        case 403:
            return FailureClass.PERMANENT_FORBIDDEN
        case 429:
            return FailureClass.THROTTLED
        case 408:
            return FailureClass.TRANSIENT
        case int() if 500 <= status <= 599:
            return FailureClass.SERVER_ERROR
        case int():
            return FailureClass.UNKNOWN
    return None


def _by_grpc(error: BaseException) -> FailureClass | None:
    code = getattr(error, "code", None)
    if not callable(code):
        return None
    try:
        return _GRPC.get(str(getattr(code(), "name", "")))
    except Exception:  # noqa: BLE001 - an unrelated `code` method that requires arguments
        return None


def _is_transient(error: BaseException) -> bool:
    if isinstance(error, OSError):
        return error.errno not in _PERMANENT_ERRNOS
    return any(base.__name__ in _TRANSIENT_NAMES for base in type(error).__mro__)


def _by_message(error: BaseException) -> FailureClass | None:
    lowered = _message(error).lower()
    if any(word in lowered for word in _THROTTLED_WORDS):
        return FailureClass.THROTTLED
    return FailureClass.PERMANENT_FORBIDDEN if any(word in lowered for word in _FORBIDDEN_WORDS[:2]) else None


def _message(error: BaseException) -> str:
    try:
        return str(error)[:4096]
    except Exception:  # noqa: BLE001 - an exception whose str() fails has no message
        return ""


def _status(error: BaseException) -> int | None:
    """The HTTP status of the exception or of the response attached to it."""
    response = _attribute(error, "response")
    if isinstance(response, Mapping):
        metadata = response.get("ResponseMetadata")
        return _http_status(metadata.get("HTTPStatusCode")) if isinstance(metadata, Mapping) else None
    for holder in (response, error):
        for name in ("status_code", "status"):
            found = _http_status(_attribute(holder, name))
            if found is not None:
                return found
    code = _attribute(error, "code")  # urllib's HTTPError
    return _http_status(code)


def _service_code(error: BaseException) -> str:
    """The service's own error code, as botocore provides it; a throttled call may have status 400."""
    response = _attribute(error, "response")
    error_details = response.get("Error") if isinstance(response, Mapping) else None
    return str(error_details.get("Code", "")) if isinstance(error_details, Mapping) else ""


def _http_status(value: Any) -> int | None:
    fits = isinstance(value, int) and not isinstance(value, bool) and 100 <= value <= 599
    return int(value) if fits else None


def _attribute(holder: object, name: str) -> Any:
    try:
        return getattr(holder, name, None)
    except Exception:  # noqa: BLE001 - httpx raises for a response that was never set
        return None
