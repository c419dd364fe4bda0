"""How an attempt ended, as a worker reports it: results, exceptions, stops. No I/O."""

from __future__ import annotations

import traceback
from collections.abc import Mapping
from typing import Any, Final

import msgspec

from rota.infra.telemetry.redaction import MASK, is_secret, redact_text
from rota.model.attempt_codes import AttemptCode
from rota.model.protocol import AttemptResult, AttemptStatus
from rota.sdk import payload
from rota.sdk.exceptions import Cancelled, Fatal, Retry
from rota.sdk.payload import Signature

ERROR_CHARS_MAX: Final = 10_000
INLINE_VALUE_BYTES_MAX: Final = 64 * 1024
"""Larger values go to the blob store, not into the report."""
_SECRET_CHARS_MIN = 6


class TaskInput(msgspec.Struct, forbid_unknown_fields=True):
    """Arguments of a task call."""

    args: list[Any] = []
    kwargs: dict[str, Any] = {}

    @property
    def is_shareable(self) -> bool:
        """Whether several calls may share these objects: all are immutable scalars."""
        return all(isinstance(value, _SCALARS) for value in (*self.args, *self.kwargs.values()))


_SCALARS = (int, float, str, bytes, type(None))
_INPUT_DECODER = msgspec.msgpack.Decoder(TaskInput)
_EMPTY_INPUT = TaskInput()


INTENTIONAL_EXCEPTIONS = (Fatal, Retry, Cancelled)
"""Raised on purpose by a task: their message is enough, no traceback is logged."""


class UnencodableResult(Exception):
    """msgpack cannot encode the value."""


def decode_input(data: bytes | None, signature: Signature | None = None) -> TaskInput:
    """Raises msgspec.DecodeError when `data` does not fit the task's signature."""
    if data is None:
        return _EMPTY_INPUT
    decoded = _INPUT_DECODER.decode(data)
    return decoded if signature is None else TaskInput(*signature.convert_arguments(decoded.args, decoded.kwargs))


def encode_result(value: object) -> bytes:
    try:
        return payload.encode_value(value)
    except Exception as error:
        raise UnencodableResult(f"{type(error).__name__}: {error}") from error


def failure_end(token: int, error: BaseException, env: Mapping[str, str] | None = None) -> AttemptResult:
    """The end of a frame whose task raised `error`."""
    status, code, after_s = AttemptStatus.FAILED, AttemptCode.EXCEPTION, 0.0
    if isinstance(error, Fatal):
        status, code = AttemptStatus.FAILED_FATAL, AttemptCode.FATAL
    elif isinstance(error, Retry):
        status, code, after_s = AttemptStatus.FAILED_RETRYABLE, AttemptCode.RETRY, max(0.0, float(error.after))
    return AttemptResult(
        token, status, code=code, error=redact_and_truncate(describe_error(error), env), after_s=after_s
    )


def bad_input_end(token: int, error: BaseException) -> AttemptResult:
    return AttemptResult(
        token,
        AttemptStatus.FAILED_FATAL,
        code=AttemptCode.BAD_INPUT,
        error=redact_and_truncate(f"The task cannot be called: {error}"),
    )


def unencodable_end(token: int, error: UnencodableResult) -> AttemptResult:
    return AttemptResult(
        token,
        AttemptStatus.FAILED,
        code=AttemptCode.UNENCODABLE_RESULT,
        error=redact_and_truncate(f"The result cannot be encoded: {error}"),
    )


def too_large_message(size: int) -> str:
    return f"The result has {size} bytes: set store.directory for more than {INLINE_VALUE_BYTES_MAX}."


def format_traceback(error: BaseException, env: Mapping[str, str] | None = None) -> str:
    """Traceback for the frame's log, without the worker's own stack frames."""
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_globals.get("__name__", "").startswith("rota.worker."):
        trace = trace.tb_next
    return redact_and_truncate("".join(traceback.format_exception(type(error), error, trace)), env).rstrip()


def describe_error(error: BaseException) -> str:
    try:
        text = str(error)
    except Exception as broken:  # noqa: BLE001 - the task's own exception class may be broken
        text = f"<str() failed with {type(broken).__name__}>"
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def redact_and_truncate(text: str, env: Mapping[str, str] | None = None) -> str:
    """Masks secrets, including those in the frame's environment, and limits the length."""
    for name, value in (env or {}).items():
        if is_secret(name) and len(value) >= _SECRET_CHARS_MIN:
            text = text.replace(value, MASK)
    text = redact_text(text)
    if len(text) > ERROR_CHARS_MAX:
        text = f"{text[: ERROR_CHARS_MAX - 60]}... ({len(text)} characters in all)"
    # Lone surrogates cannot be encoded.
    return text.encode(errors="replace").decode()
