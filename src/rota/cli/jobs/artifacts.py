"""`rota job artifacts`: list or fetch the files that a job's frames produced.

A file is written under a temporary name and renamed when complete, and an identical existing file is left alone, so the
command can be repeated. File names come from workers: a name that leads out of the directory is refused.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator
from hashlib import file_digest
from pathlib import Path
from typing import Final

import msgspec

from rota.api.jobs import JobView, Layer
from rota.cli.core.output_format import OutputFormat
from rota.cli.core.resolve_ids import find_job
from rota.cli.core.tables import CliPage, Table
from rota.cli.dlq.view import pluralize
from rota.cli.jobs.actions import open_jobs
from rota.cli.local.up import with_local_store
from rota.cli.quota.actions import print_page
from rota.engine.engine import store_target
from rota.engine.queries.jobs import FrameArtifact, JobQueries
from rota.infra.blob_store import BlobPointer, BlobStore
from rota.model.artifacts import check_artifact_name
from rota.model.errors import InvalidInput, SetupFailed
from rota.model.policy.outputs import check_readable
from rota.model.settings import Settings

FRAMES_MAX: Final = 10_000


class ArtifactFile(msgspec.Struct, frozen=True):
    layer: Layer
    kept: FrameArtifact
    pointer: BlobPointer

    @property
    def frame(self) -> int:
        return self.layer.frames.number(self.kept.frame)


def show_artifacts(
    settings: Settings, which: str, *, frame: int | None, layer: str | None, to: Path | None, form: OutputFormat
) -> None:
    async def done() -> CliPage:
        async with open_jobs(settings) as jobs:
            job = await jobs.get(await find_job(jobs, which))
            files = [file for one in _layers(job, layer) for file in await _files(jobs, one, frame)]
            if not files:
                await _check_readable(jobs, job, layer, frame)
            if to is None or not files:
                return _list_page(job, files)
            store = BlobStore(jobs.database, store_target(with_local_store(settings)))
            return _fetched_page(files, [await _fetch(store, file, _target_path(job, file, to)) for file in files], to)

    print_page(asyncio.run(done()), form=form)


async def _check_readable(jobs: JobQueries, job: JobView, name: str | None, frame: int | None) -> None:
    """Raise when there may be files whose output is withheld."""
    for layer in _layers(job, name):
        queue_number = 0 if frame is None else layer.frames.queue_number(frame)
        kept = await jobs.withheld_outputs(layer.id, frame=queue_number, most=1) if queue_number is not None else {}
        for at, output in kept.items():
            if frame is None or at == queue_number:
                check_readable(output, job.id, layer.frames.number(at))


def _layers(job: JobView, name: str | None) -> list[Layer]:
    found = [layer for layer in job.layers if name is None or layer.name == name]
    if not found:
        raise InvalidInput(f"Job {job.id} has no layer {name!r}: `rota job show {job.id}` lists them.")
    return found


async def _files(jobs: JobQueries, layer: Layer, frame: int | None) -> list[ArtifactFile]:
    queue_number = 0 if frame is None else layer.frames.queue_number(frame)
    if queue_number is None:
        return []
    kept = await jobs.artifacts(layer.id, frame=queue_number, most=1 if frame is not None else FRAMES_MAX)
    return [
        ArtifactFile(layer, one, BlobPointer.parse(one.pointer))
        for one in kept
        if frame is None or one.frame == queue_number
    ]


def _target_path(job: JobView, file: ArtifactFile, to: Path) -> Path:
    """Below `to`: by layer when the job has several, by frame when it has several."""
    parts = [file.layer.name.replace("/", "_")] if len(job.layers) > 1 else []
    if sum(layer.frames.count for layer in job.layers) > 1:
        parts.append(str(file.frame))
    return to.joinpath(*parts, check_artifact_name(file.kept.name))


async def _fetch(store: BlobStore, file: ArtifactFile, path: Path) -> Path:
    try:
        if not await asyncio.to_thread(_is_fetched, path, file.pointer):
            await _download(store.read(file.kept.pointer), path)
    except OSError as error:
        raise SetupFailed(f"{path} cannot be written ({error.strerror}): fetch to a writable directory.") from error
    return path


def _is_fetched(path: Path, pointer: BlobPointer) -> bool:
    if not path.exists():
        return False
    with path.open("rb") as file:
        if file_digest(file, "sha256").digest() != pointer.sha256:
            raise InvalidInput(f"{path} already exists with different content: fetch to another directory.")
    return True


async def _download(parts: AsyncIterator[bytes], path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{secrets.token_hex(8)}")
    try:
        with temporary.open("xb") as target:
            async for part in parts:
                await asyncio.to_thread(target.write, part)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def _list_page(job: JobView, files: list[ArtifactFile]) -> CliPage:
    data = [_data(file) for file in files]
    if not files:
        return CliPage(data, [f"No frame of job {job.id} has produced a file."])
    rows = [
        (file.layer.name, file.frame, file.kept.name, file.pointer.size, file.pointer.sha256.hex()[:16])
        for file in files
    ]
    return CliPage(data, [Table(("layer", "frame", "artifact", "bytes", "sha256"), rows)])


def _fetched_page(files: list[ArtifactFile], places: list[Path], to: Path) -> CliPage:
    data = [_data(file) | {"path": str(path)} for file, path in zip(files, places, strict=True)]
    total = sum(file.pointer.size for file in files)
    return CliPage(data, [f"Fetched {pluralize(len(files), 'file')} to {to}, {pluralize(total, 'byte')} in all."])


def _data(file: ArtifactFile) -> dict[str, object]:
    return {
        "layer": file.layer.name,
        "frame": file.frame,
        "attempt": file.kept.attempt,
        "name": file.kept.name,
        "bytes": file.pointer.size,
        "sha256": file.pointer.sha256.hex(),
    }
