"""How an attempt ended, as a worker reports it: values, exceptions, stops. No I/O.

Codes are stable words: `exception`, `fatal`, `retry`, `bad_input`, `input_missing`, `unencodable_result`,
`result_too_large`, `artifact_missing`, `artifact_too_large`, `artifact_limit`, `artifact_not_stored`, `exit_status`,
`signal`, `cpu_limit`, `file_limit`, `no_command`, `no_process`, `timeout`, `cancelled`, and of frames that never began
or were given back: `no_room`, `unknown_task`, `draining`, `worker_stopped`.
"""

from __future__ import annotations

import traceback
from collections.abc import Mapping
from typing import Any, Final

import msgspec

from rota.infra.telemetry.redaction import MASK, is_secret, redact_text
from rota.model.protocol import AttemptResult, AttemptStatus
from rota.sdk import payload
from rota.sdk.exceptions import Cancelled, Fatal, Retry
from rota.sdk.payload import Signature

ERROR_CHARS_MAX: Final = 10_000
INLINE_VALUE_BYTES_MAX: Final = 64 * 1024
"""Larger values do not travel with the report."""
_SECRET_CHARS_MIN = 6


class TaskInput(msgspec.Struct, forbid_unknown_fields=True):
    """What a task is called with."""

    args: list[Any] = []
    kwargs: dict[str, Any] = {}

    @property
    def is_shareable(self) -> bool:
        """Whether several calls may be given the very same objects."""
        return all(isinstance(held, _SCALARS) for held in (*self.args, *self.kwargs.values()))


_SCALARS = (int, float, str, bytes, type(None))
_INPUT_DECODER = msgspec.msgpack.Decoder(TaskInput)
_EMPTY_INPUT = TaskInput()


INTENTIONAL_EXCEPTIONS = (Fatal, Retry, Cancelled)
"""Said on purpose: what they say is enough, nobody needs the trace."""


class UnencodableResult(Exception):
    """A value that msgpack has no way to write."""


def decode_input(data: bytes | None, signature: Signature | None = None) -> TaskInput:
    """Raises msgspec.DecodeError when `data` is not what a task can be called with."""
    if data is None:
        return _EMPTY_INPUT
    given = _INPUT_DECODER.decode(data)
    return given if signature is None else TaskInput(*signature.convert_arguments(given.args, given.kwargs))


def encode_result(value: object) -> bytes:
    try:
        return payload.encode_value(value)
    except Exception as error:
        raise UnencodableResult(f"{type(error).__name__}: {error}") from error


def failure_end(token: int, error: BaseException, env: Mapping[str, str] | None = None) -> AttemptResult:
    """An exception that left the task."""
    status, code, after_s = AttemptStatus.FAILED, "exception", 0.0
    if isinstance(error, Fatal):
        status, code = AttemptStatus.FAILED_FATAL, "fatal"
    elif isinstance(error, Retry):
        status, code, after_s = AttemptStatus.FAILED_RETRYABLE, "retry", max(0.0, float(error.after))
    return AttemptResult(
        token, status, code=code, error=redact_and_truncate(describe_error(error), env), after_s=after_s
    )


def bad_input_end(token: int, error: BaseException) -> AttemptResult:
    return AttemptResult(
        token,
        AttemptStatus.FAILED_FATAL,
        code="bad_input",
        error=redact_and_truncate(f"The task cannot be called: {error}"),
    )


def unencodable_end(token: int, error: UnencodableResult) -> AttemptResult:
    return AttemptResult(
        token,
        AttemptStatus.FAILED,
        code="unencodable_result",
        error=redact_and_truncate(f"The result cannot be kept: {error}"),
    )


def too_large_message(size: int) -> str:
    return f"The result has {size} bytes; more than {INLINE_VALUE_BYTES_MAX} need store.directory to be set."


def format_traceback(error: BaseException, env: Mapping[str, str] | None = None) -> str:
    """Where it was raised, for the log of its frame; what of ours is around it helps nobody."""
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_globals.get("__name__", "").startswith("rota.worker."):
        trace = trace.tb_next
    return redact_and_truncate("".join(traceback.format_exception(type(error), error, trace)), env).rstrip()


def describe_error(error: BaseException) -> str:
    try:
        text = str(error)
    except Exception as broken:  # noqa: BLE001 - the task's own exception class may be broken
        text = f"<its text failed with {type(broken).__name__}>"
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def redact_and_truncate(text: str, env: Mapping[str, str] | None = None) -> str:
    """`text` without secrets, those of the frame's environment included, and not too long."""
    for name, value in (env or {}).items():
        if is_secret(name) and len(value) >= _SECRET_CHARS_MIN:
            text = text.replace(value, MASK)
    text = redact_text(text)
    if len(text) > ERROR_CHARS_MAX:
        text = f"{text[: ERROR_CHARS_MAX - 60]}... ({len(text)} characters in all)"
    # Lone surrogates cannot travel.
    return text.encode(errors="replace").decode()
