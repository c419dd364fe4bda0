"""Bodies of JSON lines, read as they come and given up as soon as they are too much."""

from __future__ import annotations

from typing import Any, Final

from litestar import Request

from rota.model.errors import InvalidInput, TooLarge
from rota.model.job import SUBMISSION_BYTES_MAX, Submission, decode

BYTES_MAX: Final = 64 * 1024 * 1024


async def read_lines(request: Request[Any, Any, Any], *, most: int) -> list[Submission]:
    """Each line a submission; the first that cannot be read is named by its number, and nothing was done."""
    submissions: list[Submission] = []
    rest, size = b"", 0
    async for chunk in request.stream():
        size += len(chunk)
        if size > BYTES_MAX:
            raise TooLarge(f"A request of more than {BYTES_MAX} bytes is too large: submit in several requests.")
        *lines, rest = (rest + chunk).split(b"\n") if b"\n" in chunk else [rest + chunk]
        if len(rest) > SUBMISSION_BYTES_MAX:
            raise TooLarge(
                f"Line {len(submissions) + len(lines) + 1} is longer than {SUBMISSION_BYTES_MAX} bytes: put large"
                " inputs into the store and submit their pointers."
            )
        _read(lines, submissions, most)
    _read([rest], submissions, most)
    if not submissions:
        raise InvalidInput("The request holds no line: send one submission as JSON on each.")
    return submissions


def _read(lines: list[bytes], submissions: list[Submission], most: int) -> None:
    for line in lines:
        if not line or line.isspace():
            continue
        if len(submissions) == most:
            raise TooLarge(f"A request holds at most {most} submissions: send the rest in another.")
        try:
            submissions.append(decode(line))
        except InvalidInput as error:
            number = len(submissions) + 1
            raise InvalidInput(f"Submission {number}: {error.sentence}", number=number) from error
