"""What a task can ask about the frame it runs for, and tell about it: `rota.context()`.

A task that is called like any function, in a test or a script, finds a context of nobody's: frame 0, never cancelled,
in the current directory, and whatever it tells goes nowhere.
"""

from __future__ import annotations

from contextvars import ContextVar
from pathlib import Path
from typing import Protocol
from uuid import UUID

from rota.model.artifacts import check_artifact_name
from rota.sdk.exceptions import Cancelled


class AttemptInfo(Protocol):
    """What all frames of a portion have in common."""

    @property
    def job(self) -> UUID: ...

    @property
    def layer(self) -> UUID: ...

    @property
    def attempt(self) -> int: ...


class FrameSink(Protocol):
    """Who hears what a frame tells about itself."""

    def progress(self, token: int, percent: float, word: str, /) -> None: ...

    def log(self, token: int, line: str, /) -> None: ...

    def folder(self, token: int, /) -> Path: ...

    def add_artifact(self, token: int, path: Path, name: str, /) -> None: ...


class Context:
    """One attempt of one frame. Its methods may be called from any thread of the task."""

    __slots__ = ("_attempt", "_ear", "_token", "cancelled", "frame", "gpus")

    def __init__(
        self, attempt: AttemptInfo, frame: int, token: int, ear: FrameSink, gpus: tuple[int, ...] = ()
    ) -> None:
        self._attempt = attempt
        self._token = token
        self._ear = ear
        self.frame = frame
        """Its number in the layer."""
        self.gpus = gpus
        """Numbers of the devices that are this frame's while it runs."""
        self.cancelled = False
        """Whether it was asked to stop. It is killed, or given up, a while after that."""

    @property
    def job(self) -> UUID:
        return self._attempt.job

    @property
    def layer(self) -> UUID:
        return self._attempt.layer

    @property
    def attempt(self) -> int:
        """Which attempt of the frame this is."""
        return self._attempt.attempt

    def progress(self, percent: float, word: str = "") -> None:
        """Tell how far it has come, from 0 to 100. Only the latest is kept."""
        self._ear.progress(self._token, min(100.0, max(0.0, float(percent))), word)

    def log(self, line: str) -> None:
        """A line for the frame's own log."""
        self._ear.log(self._token, line)

    @property
    def folder(self) -> Path:
        """A directory of this frame's own, made when it is first asked for; it goes when the frame has ended."""
        return self._ear.folder(self._token)

    def artifact(self, path: str | Path, name: str = "") -> None:
        """Keep a file with the job: one of `folder`, or of any other place. Taken when the frame has succeeded.

        It is called `name`, or else as in `folder`, or by the last part of its path.
        """
        given = Path(path)
        called = name or (given.name if given.is_absolute() else given.as_posix())
        self._ear.add_artifact(self._token, self.folder / given, check_artifact_name(called))

    def check(self) -> None:
        """Raises `Cancelled` if the frame was asked to stop: for loops that never wait for anything else."""
        if self.cancelled:
            raise Cancelled


class _NoFrame:
    job = layer = UUID(int=0)
    attempt = 0

    def progress(self, _token: int, _percent: float, _word: str) -> None:
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
    """Of the frame that runs this code."""
    return CURRENT_CONTEXT.get(None) or Context(_NO_FRAME, 0, 0, _NO_FRAME)
