"""Bodies with many submissions: JSON lines or one msgpack array; read as a stream and rejected when too large."""

from __future__ import annotations

from typing import Any, Final, Protocol

import msgspec
from litestar import Request

from rota.model.errors import InvalidInput, TooLarge
from rota.model.jobs.submission import SUBMISSION_BYTES_MAX, Submission, decode_submission

BULK_BYTES_MAX: Final = 64 * 1024 * 1024


class Digest(Protocol):
    """Of `hashlib`."""

    def update(self, data: bytes, /) -> None: ...


async def read_submissions(
    request: Request[Any, Any, Any], *, max_count: int, digest: Digest | None = None
) -> list[Submission]:
    """Raises for the first invalid submission and names its number; nothing has been submitted then. `digest` is
    updated with the body."""
    if "msgpack" in request.headers.get("content-type", ""):
        return await _read_array(request, max_count, digest)
    return await _read_lines(request, max_count, digest)


async def _read_array(request: Request[Any, Any, Any], max_count: int, digest: Digest | None) -> list[Submission]:
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if digest is not None:
            digest.update(chunk)
        _check_size(len(body))
    try:
        items = msgspec.msgpack.decode(body, type=list[msgspec.Raw])
    except (msgspec.DecodeError, RecursionError) as error:
        raise InvalidInput("The body is not a msgpack array: send an array of submissions.") from error
    submissions: list[Submission] = []
    _decode_lines([bytes(item) for item in items], submissions, max_count)
    return _require_any(submissions)


async def _read_lines(request: Request[Any, Any, Any], max_count: int, digest: Digest | None) -> list[Submission]:
    submissions: list[Submission] = []
    rest, size = b"", 0
    async for chunk in request.stream():
        if digest is not None:
            digest.update(chunk)
        size += len(chunk)
        _check_size(size)
        *lines, rest = (rest + chunk).split(b"\n") if b"\n" in chunk else [rest + chunk]
        if len(rest) > SUBMISSION_BYTES_MAX:
            raise TooLarge(
                f"Line {len(submissions) + len(lines) + 1} is longer than {SUBMISSION_BYTES_MAX} bytes: put large"
                " inputs into the store and submit their pointers."
            )
        _decode_lines(lines, submissions, max_count)
    _decode_lines([rest], submissions, max_count)
    return _require_any(submissions)


def _check_size(size: int) -> None:
    if size > BULK_BYTES_MAX:
        raise TooLarge(f"A request of more than {BULK_BYTES_MAX} bytes is too large: submit in several requests.")


def _require_any(submissions: list[Submission]) -> list[Submission]:
    if not submissions:
        raise InvalidInput("The request has no submission: send one as JSON per line, or a msgpack array.")
    return submissions


def _decode_lines(lines: list[bytes], submissions: list[Submission], max_count: int) -> None:
    for line in lines:
        if not line or line.isspace():
            continue
        if len(submissions) == max_count:
            raise TooLarge(f"A request can have at most {max_count} submissions: send the rest in another request.")
        try:
            submissions.append(decode_submission(line))
        except InvalidInput as error:
            number = len(submissions) + 1
            raise InvalidInput(f"Submission {number}: {error.sentence}", number=number) from error
