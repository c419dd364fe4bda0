"""Failpoints: named places where a test can kill or pause this process, or lose a reply.

    CRASH_AT=lease.after_acquire        exit there on the first visit, as by kill -9 (status 137)
    PAUSE_AT=relay.before_mark:3        stop there on the third visit (SIGSTOP); SIGCONT resumes
    LOST_REPLY_AT=lease.renew           the operation is done, its reply is lost: `after_send` raises LostReply

Several failpoints are separated by commas. A failpoint is `package.point` and occurs once in the source tree (a unit
test checks this). The variables are read once, at import: if none is set, `hit` and `after_send` are empty functions.
An armed process logs to stderr when this module is imported, because production must never be armed unnoticed, and logs
the failpoint before it fails there.
"""

from __future__ import annotations

import os
import re
import signal
import threading
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Final

from rota.model.errors import InvalidSetting

CRASH_EXIT_STATUS: Final = 137
"""Exit status of a process that died at a failpoint; as a shell shows it after kill -9."""

_FAILPOINT_SPEC = re.compile(r"([a-z][a-z0-9_]*\.[a-z][a-z0-9_]*)(?::([1-9][0-9]*))?")
_FAILPOINT_CALL = re.compile(r"^[^`#\n]*\bfailpoints\.(hit|after_send)\(\s*\"?([^)\"]*)", re.MULTILINE)


class LostReply(ConnectionError):
    """The call was carried out; its reply was dropped on purpose."""


class FaultPlan:
    """Which failpoints fail, and on which visit. One plan per process; `parse` reads it from the environment."""

    def __init__(self, crash: Mapping[str, int], pause: Mapping[str, int], lose: Mapping[str, int]) -> None:
        self.crash = crash
        self.pause = pause
        self.lose = lose
        self._visits: dict[tuple[str, str], int] = {}
        self._lock = threading.Lock()

    @classmethod
    def parse(cls, environment: Mapping[str, str]) -> FaultPlan:
        crash, pause, lose = (_parse_failpoints(environment, key) for key in ("CRASH_AT", "PAUSE_AT", "LOST_REPLY_AT"))
        return cls(crash, pause, lose)

    def __bool__(self) -> bool:
        return bool(self.crash or self.pause or self.lose)

    def hit(self, name: str) -> None:
        visit = self._count("hit", name)
        if self.pause.get(name) == visit:
            # Sent to this thread, so that it stops exactly here.
            signal.raise_signal(signal.SIGSTOP)
        if self.crash.get(name) == visit:
            _log_warning("failpoint_crash", place=name)
            os._exit(CRASH_EXIT_STATUS)

    def after_send(self, name: str) -> None:
        if self.lose.get(name) == self._count("after_send", name):
            _log_warning("failpoint_lost_reply", place=name)
            raise LostReply(f"The reply at {name} was dropped by LOST_REPLY_AT.")

    def _count(self, kind: str, name: str) -> int:
        with self._lock:
            visit = self._visits.get((kind, name), 0) + 1
            self._visits[kind, name] = visit
        return visit


def _parse_failpoints(environment: Mapping[str, str], key: str) -> dict[str, int]:
    visits: dict[str, int] = {}
    for text in environment.get(key, "").split(","):
        if not text.strip():
            continue
        match = _FAILPOINT_SPEC.fullmatch(text.strip())
        if match is None:
            raise InvalidSetting(
                f"{key}={text.strip()!r} is not a failpoint: write package.point or package.point:n with n from 1."
            )
        visits[match[1]] = int(match[2] or 1)
    return visits


@cache
def declared_failpoints() -> tuple[tuple[str, str], ...]:
    """Every failpoint in the source as (kind, name), kind being `hit` or `after_send`; for tests that visit all."""
    sources = [path.read_text() for path in sorted(Path(__file__).parents[1].rglob("*.py"))]
    return tuple((found[1], found[2]) for text in sources for found in _FAILPOINT_CALL.finditer(text))


def _noop(_name: str) -> None:
    return None


def _log_warning(event: str, **facts: object) -> None:
    import sys

    import structlog

    log = structlog.wrap_logger(
        structlog.WriteLogger(sys.stderr),
        processors=[
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.JSONRenderer(),
        ],
    )
    log.warning(event, level="warning", **facts)


_plan = FaultPlan.parse(os.environ)
hit: Callable[[str], None] = _plan.hit if _plan else _noop
"""A failpoint between two steps: `failpoints.hit("lease.after_acquire")`."""
after_send: Callable[[str], None] = _plan.after_send if _plan else _noop
"""A failpoint right after the awaited call, when its reply arrives: `failpoints.after_send("lease.renew")`."""

if _plan:
    _log_warning("failpoints_armed", crash_at=_plan.crash, pause_at=_plan.pause, lost_reply_at=_plan.lose)
