"""Artifacts: a directory for each frame that requests one, and the files in it that are stored with the job.

Files are stored after a frame has succeeded and before its end is reported, so a report names only stored artifacts.
Small files are sent inside the report, like small results; larger ones go to the blob store, and without one the frame
fails. A frame that does not succeed has no artifacts. Crash in between: unreferenced blobs remain until the store's
retention removes them; frame directories remain until an operator removes them, as with commands.
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

from rota.model.artifacts import ARTIFACTS_MAX, check_artifact_name
from rota.model.attempt_codes import AttemptCode
from rota.model.errors import InvalidInput, RotaError
from rota.model.protocol import Artifact
from rota.worker.data.blob_store import WorkerBlobStore
from rota.worker.outcomes import INLINE_VALUE_BYTES_MAX
from rota.worker.progress_reporter import ProgressReporter

INPUT_FILE_NAME: Final = "input.msgpack"
INLINE_ARTIFACT_BYTES_MAX: Final = 256 * 1024
"""Total artifact bytes of a frame that are sent inside its report."""


class OutputNotStored(Exception):
    """An artifact or result cannot be stored; carries a stable code and a message."""

    def __init__(self, code: str, sentence: str) -> None:
        super().__init__(sentence)
        self.code = code


class FrameArtifacts:
    def __init__(self, work_dir: Path, *, keep_dirs: bool) -> None:
        self.open: dict[int, dict[str, Path]] = {}
        """Per token of a frame that requested a directory: artifact name to file."""
        self._work_dir = work_dir
        self._work_dir_name = str(work_dir)
        self._keep_dirs = keep_dirs
        self._removing: set[asyncio.Future[None]] = set()

    def dir_path(self, token: int) -> Path:
        """Directory of a frame; it may not exist."""
        return self._work_dir / f"{token}"

    def dir_name(self, token: int) -> str:
        """As `dir_path`: making path objects takes as long as sending a frame to its process."""
        return f"{self._work_dir_name}/{token}"

    def folder(self, token: int) -> Path:
        path = self.dir_path(token)
        if token not in self.open:
            self.open[token] = {}
            path.mkdir(parents=True, exist_ok=True)
        return path

    def add_artifact(self, token: int, path: Path, name: str) -> None:
        self.open.setdefault(token, {})[name] = path

    def store_all(
        self, token: int, patterns: Sequence[str], store: WorkerBlobStore | None, bytes_max: int = 0
    ) -> tuple[Artifact, ...]:
        """Stores the artifacts of a frame, or raises OutputNotStored. Blocking: call it in a thread.

        Nothing is stored if they exceed `bytes_max` in total (0: no limit).
        """
        found = _match_files(self.dir_path(token), patterns) | self.open.get(token, {})
        if len(found) > ARTIFACTS_MAX:
            raise OutputNotStored(
                AttemptCode.ARTIFACT_TOO_LARGE,
                f"The frame has {len(found)} artifacts: at most {ARTIFACTS_MAX} are stored.",
            )
        if bytes_max and (size := sum(path.stat().st_size for path in found.values() if path.is_file())) > bytes_max:
            raise OutputNotStored(
                AttemptCode.ARTIFACT_LIMIT, f"The frame has {size} bytes of artifacts: its policy allows {bytes_max}."
            )
        return _store_files(found, store)

    def discard(self, token: int) -> None:
        """Removes the directory of an ended frame."""
        if self.open.pop(token, None) is not None and not self._keep_dirs:
            removing = asyncio.get_running_loop().run_in_executor(None, remove_tree, self.dir_path(token))
            self._removing.add(removing)
            removing.add_done_callback(self._removing.discard)

    async def close(self) -> None:
        if self._removing:
            await asyncio.wait(set(self._removing))


class LoopFrameSink:
    """`FrameSink` for tasks on the event loop; callable from any thread."""

    def __init__(self, progress_reporter: ProgressReporter, artifacts: FrameArtifacts) -> None:
        self.progress: Callable[[int, float, str], None] = progress_reporter.progress
        self.log: Callable[[int, str], None] = progress_reporter.log
        self.folder: Callable[[int], Path] = artifacts.folder
        self.add_artifact: Callable[[int, Path, str], None] = artifacts.add_artifact


def _match_files(folder: Path, patterns: Sequence[str]) -> dict[str, Path]:
    """Matching files by relative path; symlinks that leave the directory do not match."""
    found: dict[str, Path] = {}
    inside = folder.resolve()
    for pattern in patterns:
        matches = [
            path
            for path in sorted(folder.glob(pattern))
            if path.is_file() and path.resolve().is_relative_to(inside) and path != folder / INPUT_FILE_NAME
        ]
        if not matches:
            raise OutputNotStored(
                AttemptCode.ARTIFACT_MISSING, f"No file in the frame's directory matches {pattern!r}."
            )
        found |= {path.relative_to(folder).as_posix(): path for path in matches}
    return found


def _store_files(found: Mapping[str, Path], store: WorkerBlobStore | None) -> tuple[Artifact, ...]:
    artifacts: list[Artifact] = []
    inline_bytes = 0
    for name, path in sorted(found.items()):
        artifact = _store_file(name, path, store, INLINE_ARTIFACT_BYTES_MAX - inline_bytes)
        inline_bytes += len(artifact.data)
        artifacts.append(artifact)
    return tuple(artifacts)


def _store_file(name: str, path: Path, store: WorkerBlobStore | None, inline_bytes_left: int) -> Artifact:
    try:
        check_artifact_name(name)
        if not path.is_file():
            raise OutputNotStored(AttemptCode.ARTIFACT_MISSING, f"The artifact {name!r} is not a file, or was removed.")
        inline_max = min(INLINE_VALUE_BYTES_MAX, inline_bytes_left)
        with path.open("rb") as file:
            data = file.read(inline_max + 1)
        if len(data) <= inline_max:
            return Artifact(name, data=data)
        if store is None:
            raise OutputNotStored(
                AttemptCode.ARTIFACT_TOO_LARGE,
                f"The artifact {name!r} has {path.stat().st_size} bytes: set store.directory for more than"
                f" {INLINE_VALUE_BYTES_MAX}, or {INLINE_ARTIFACT_BYTES_MAX} together with others.",
            )
        return Artifact(name, store.put_file(path))
    except InvalidInput as error:
        raise OutputNotStored(
            AttemptCode.ARTIFACT_TOO_LARGE, f"The artifact {name!r} cannot be stored. {error.sentence}"
        ) from error
    except RotaError as error:
        raise OutputNotStored(
            AttemptCode.ARTIFACT_NOT_STORED, f"The artifact {name!r} could not be stored. {error.sentence}"
        ) from error
    except OSError as error:
        raise OutputNotStored(
            AttemptCode.ARTIFACT_MISSING, f"The artifact {name!r} cannot be read ({error.strerror})."
        ) from error


def remove_tree(folder: Path) -> None:
    """Removes a directory tree, making directories writable where needed."""

    def make_writable_and_retry(_call: object, path: str, _error: object) -> None:
        for each in (Path(path).parent, Path(path)):
            with suppress(OSError):
                each.chmod(0o700)
        shutil.rmtree(path, ignore_errors=True)

    shutil.rmtree(folder, onerror=make_writable_and_retry)
    if folder.exists():
        shutil.rmtree(folder, ignore_errors=True)
