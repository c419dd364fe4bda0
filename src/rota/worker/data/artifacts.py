"""What frames leave behind: a directory for each that asks for one, and the files in it that are kept with the job.

Files are taken when a frame has succeeded, before its end is told: an end that names artifacts names files that are
stored. Small ones travel with the report, like small results; others go to the store, and without one the frame fails.
A frame that ends in any other way leaves nothing. If we die in between, files of the store that nobody points to remain
until its retention removes them, and directories until somebody removes them, as with commands.
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

from rota.model.artifacts import ARTIFACTS_MAX, check_artifact_name
from rota.model.errors import InvalidInput, RotaError
from rota.model.protocol import Artifact
from rota.worker.data.blob_store import WorkerBlobStore
from rota.worker.outcomes import INLINE_VALUE_BYTES_MAX
from rota.worker.progress_reporter import ProgressReporter

INPUT_FILE_NAME: Final = "input.msgpack"
INLINE_ARTIFACT_BYTES_MAX: Final = 256 * 1024
"""Bytes of all artifacts of a frame that travel with its report."""


class OutputNotStored(Exception):
    """An artifact that cannot be kept, by code and sentence."""

    def __init__(self, code: str, sentence: str) -> None:
        super().__init__(sentence)
        self.code = code


class FrameArtifacts:
    def __init__(self, work_dir: Path, *, keep_dirs: bool) -> None:
        self.open: dict[int, dict[str, Path]] = {}
        """By token, of frames of tasks that asked for a directory: files they named, by what they call them."""
        self._work_dir = work_dir
        self._keep_dirs = keep_dirs
        self._removing: set[asyncio.Future[None]] = set()

    def dir_path(self, token: int) -> Path:
        """Where the directory of a frame is, or would be."""
        return self._work_dir / f"{token}"

    def folder(self, token: int) -> Path:
        place = self.dir_path(token)
        if token not in self.open:
            self.open[token] = {}
            place.mkdir(parents=True, exist_ok=True)
        return place

    def add_artifact(self, token: int, path: Path, name: str) -> None:
        self.open.setdefault(token, {})[name] = path

    def store_all(
        self, token: int, patterns: Sequence[str], store: WorkerBlobStore | None, bytes_max: int = 0
    ) -> tuple[Artifact, ...]:
        """All that a frame leaves, stored. Blocks, so it is called in a thread; `Unkept` says what is wrong.

        What is beyond `bytes_max` (0: no limit) is not stored at all.
        """
        found = _match_files(self.dir_path(token), patterns) | self.open.get(token, {})
        if len(found) > ARTIFACTS_MAX:
            raise OutputNotStored(
                "artifact_too_large", f"It left {len(found)} artifacts, at most {ARTIFACTS_MAX} are kept."
            )
        if bytes_max and (size := sum(path.stat().st_size for path in found.values() if path.is_file())) > bytes_max:
            raise OutputNotStored(
                "artifact_limit", f"It left {size} bytes of artifacts, and its policy allows {bytes_max}."
            )
        return _store_files(found, store)

    def discard(self, token: int) -> None:
        """The frame is over: so is its directory."""
        if self.open.pop(token, None) is not None and not self._keep_dirs:
            removing = asyncio.get_running_loop().run_in_executor(None, remove_tree, self.dir_path(token))
            self._removing.add(removing)
            removing.add_done_callback(self._removing.discard)

    async def close(self) -> None:
        if self._removing:
            await asyncio.wait(set(self._removing))


class LoopFrameSink:
    """Hears frames that run on our loop; they may speak from any thread."""

    def __init__(self, teller: ProgressReporter, leavings: FrameArtifacts) -> None:
        self.progress: Callable[[int, float, str], None] = teller.progress
        self.log: Callable[[int, str], None] = teller.log
        self.folder: Callable[[int], Path] = leavings.folder
        self.add_artifact: Callable[[int, Path, str], None] = leavings.add_artifact


def _match_files(folder: Path, patterns: Sequence[str]) -> dict[str, Path]:
    """Files of the directory by their place in it. What leads out of it is not in it."""
    found: dict[str, Path] = {}
    inside = folder.resolve()
    for pattern in patterns:
        matches = [
            path
            for path in sorted(folder.glob(pattern))
            if path.is_file() and path.resolve().is_relative_to(inside) and path != folder / INPUT_FILE_NAME
        ]
        if not matches:
            raise OutputNotStored("artifact_missing", f"Nothing in the directory of the frame is called {pattern!r}.")
        found |= {path.relative_to(folder).as_posix(): path for path in matches}
    return found


def _store_files(found: Mapping[str, Path], store: WorkerBlobStore | None) -> tuple[Artifact, ...]:
    kept: list[Artifact] = []
    along = 0
    for name, path in sorted(found.items()):
        artifact = _store_file(name, path, store, INLINE_ARTIFACT_BYTES_MAX - along)
        along += len(artifact.data)
        kept.append(artifact)
    return tuple(kept)


def _store_file(name: str, path: Path, store: WorkerBlobStore | None, room: int) -> Artifact:
    try:
        check_artifact_name(name)
        if not path.is_file():
            raise OutputNotStored("artifact_missing", f"The artifact {name!r} is no file, or not there any more.")
        most = min(INLINE_VALUE_BYTES_MAX, room)
        with path.open("rb") as file:
            data = file.read(most + 1)
        if len(data) <= most:
            return Artifact(name, data=data)
        if store is None:
            raise OutputNotStored(
                "artifact_too_large",
                f"The artifact {name!r} has {path.stat().st_size} bytes; more than {INLINE_VALUE_BYTES_MAX}, or {INLINE_ARTIFACT_BYTES_MAX} together"
                " with others, need store.directory to be set.",
            )
        return Artifact(name, store.put_file(path))
    except InvalidInput as error:
        raise OutputNotStored(
            "artifact_too_large", f"The artifact {name!r} cannot be kept. {error.sentence}"
        ) from error
    except RotaError as error:
        raise OutputNotStored(
            "artifact_not_stored", f"The artifact {name!r} could not be stored. {error.sentence}"
        ) from error
    except OSError as error:
        raise OutputNotStored(
            "artifact_missing", f"The artifact {name!r} cannot be read ({error.strerror})."
        ) from error


def remove_tree(folder: Path) -> None:
    """With what is in it, even where somebody took our right to write away."""

    def open_and_try_again(_call: object, path: str, _error: object) -> None:
        for place in (Path(path).parent, Path(path)):
            with suppress(OSError):
                place.chmod(0o700)
        shutil.rmtree(path, ignore_errors=True)

    shutil.rmtree(folder, onerror=open_and_try_again)
    if folder.exists():
        shutil.rmtree(folder, ignore_errors=True)
