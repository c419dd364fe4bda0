"""Information about the running frame, and reports from it: `rota.context()`.

Outside a worker, for example in a test or a script, the context is a stub: frame 0, never cancelled, in the current
directory; logs and progress are discarded.
"""

from __future__ import annotations

from contextvars import ContextVar
from pathlib import Path
from typing import Protocol
from uuid import UUID

from rota.model.artifacts import check_artifact_name
from rota.sdk.exceptions import Cancelled


class AttemptInfo(Protocol):
    """Attributes shared by all frames of an assigned range."""

    @property
    def job(self) -> UUID: ...

    @property
    def layer(self) -> UUID: ...

    @property
    def attempt(self) -> int: ...


class FrameSink(Protocol):
    """Receives logs, progress and artifacts of frames."""

    def progress(self, token: int, percent: float, text: str, /) -> None: ...

    def log(self, token: int, line: str, /) -> None: ...

    def folder(self, token: int, /) -> Path: ...

    def add_artifact(self, token: int, path: Path, name: str, /) -> None: ...


class Context:
    """One attempt of one frame. Its methods may be called from any thread of the task."""

    __slots__ = ("_attempt", "_sink", "_token", "cancelled", "frame", "gpus")

    def __init__(
        self, attempt: AttemptInfo, frame: int, token: int, sink: FrameSink, gpus: tuple[int, ...] = ()
    ) -> None:
        self._attempt = attempt
        self._token = token
        self._sink = sink
        self.frame = frame
        """Frame number in the layer."""
        self.gpus = gpus
        """Indexes of the GPU devices reserved for this frame."""
        self.cancelled = False
        """Whether a stop was requested. After a grace period the frame is killed or abandoned."""

    @property
    def job(self) -> UUID:
        return self._attempt.job

    @property
    def layer(self) -> UUID:
        return self._attempt.layer

    @property
    def attempt(self) -> int:
        """Attempt number of the frame, from 1."""
        return self._attempt.attempt

    def progress(self, percent: float, word: str = "") -> None:
        """Reports progress from 0 to 100. Only the latest is kept."""
        self._sink.progress(self._token, min(100.0, max(0.0, float(percent))), word)

    def log(self, line: str) -> None:
        """Appends a line to the frame's log."""
        self._sink.log(self._token, line)

    @property
    def folder(self) -> Path:
        """A directory for this frame, created on first use and removed when the frame ends."""
        return self._sink.folder(self._token)

    def artifact(self, path: str | Path, name: str = "") -> None:
        """Stores a file with the job once the frame has succeeded. Relative paths are relative to `folder`.

        `name` defaults to the relative path, or to the last part of an absolute one.
        """
        file = Path(path)
        artifact_name = name or (file.name if file.is_absolute() else file.as_posix())
        self._sink.add_artifact(self._token, self.folder / file, check_artifact_name(artifact_name))

    def check(self) -> None:
        """Raises `Cancelled` if a stop was requested. Call it in loops that do not await."""
        if self.cancelled:
            raise Cancelled


class _NoFrame:
    job = layer = UUID(int=0)
    attempt = 0

    def progress(self, _token: int, _percent: float, _text: str) -> None:
        return None

    def log(self, _token: int, _line: str) -> None:
        return None

    def folder(self, _token: int) -> Path:
        return Path.cwd()

    def add_artifact(self, _token: int, _path: Path, _name: str) -> None:
        return None


_NO_FRAME = _NoFrame()
CURRENT_CONTEXT: ContextVar[Context] = ContextVar("rota_context")


def context() -> Context:
    """The context of the frame that runs this code."""
    return CURRENT_CONTEXT.get(None) or Context(_NO_FRAME, 0, 0, _NO_FRAME)
