"""`rota job artifacts`: files that the frames of a job have left, listed or fetched.

A file is written beside its place and moved there when it is complete, and what is there already is left alone, so the
same command may be given again. Names come from workers: one that would lead out of the directory is refused.
"""

from __future__ import annotations

import asyncio
import secrets
from pathlib import Path
from typing import Final

import msgspec

from rota.cli.books import print_page
from rota.cli.books_view import Page, Table
from rota.cli.dlq_view import several
from rota.cli.form import Form
from rota.cli.jobs import opened
from rota.cli.local import with_store
from rota.cli.naming import find
from rota.engine.engine import store_target
from rota.engine.jobs import Job, Jobs, Kept, Layer
from rota.infra.store import Pointer, Store
from rota.model.artifacts import check_name
from rota.model.errors import InvalidInput, SetupFailed
from rota.model.output import check_readable
from rota.model.settings import Settings

FRAMES_MAX: Final = 10_000


class File(msgspec.Struct, frozen=True):
    layer: Layer
    kept: Kept
    pointer: Pointer

    @property
    def frame(self) -> int:
        return self.layer.frames.number(self.kept.frame)


def show(settings: Settings, which: str, *, frame: int | None, layer: str | None, to: Path | None, form: Form) -> None:
    async def done() -> Page:
        async with opened(settings) as jobs:
            job = await jobs.get(await find(jobs, which))
            files = [file for one in _layers(job, layer) for file in await _files(jobs, one, frame)]
            if not files:
                await _check_readable(jobs, job, layer, frame)
            if to is None or not files:
                return _listed(job, files)
            store = Store(jobs.database, store_target(with_store(settings)))
            return _fetched(files, [await _fetch(store, file, _place(job, file, to)) for file in files], to)

    print_page(asyncio.run(done()), form=form)


async def _check_readable(jobs: Jobs, job: Job, name: str | None, frame: int | None) -> None:
    """Raises when there may be files, and they are kept back."""
    for layer in _layers(job, name):
        place = 0 if frame is None else layer.frames.place(frame)
        kept = await jobs.kept_back(layer.id, frame=place, most=1) if place is not None else {}
        for at, output in kept.items():
            if frame is None or at == place:
                check_readable(output, job.id, layer.frames.number(at))


def _layers(job: Job, name: str | None) -> list[Layer]:
    found = [layer for layer in job.layers if name is None or layer.name == name]
    if not found:
        raise InvalidInput(f"Job {job.id} has no layer {name!r}: `rota job show {job.id}` lists them.")
    return found


async def _files(jobs: Jobs, layer: Layer, frame: int | None) -> list[File]:
    place = 0 if frame is None else layer.frames.place(frame)
    if place is None:
        return []
    kept = await jobs.artifacts(layer.id, frame=place, most=1 if frame is not None else FRAMES_MAX)
    return [File(layer, one, Pointer.parse(one.pointer)) for one in kept if frame is None or one.frame == place]


def _place(job: Job, file: File, to: Path) -> Path:
    """Below `to`: by layer where there are several, and by frame where there are."""
    parts = [file.layer.name.replace("/", "_")] if len(job.layers) > 1 else []
    if sum(layer.frames.count for layer in job.layers) > 1:
        parts.append(str(file.frame))
    return to.joinpath(*parts, check_name(file.kept.name))


async def _fetch(store: Store, file: File, place: Path) -> Path:
    data = await store.get(file.kept.pointer)
    try:
        _write(place, data)
    except OSError as error:
        raise SetupFailed(f"{place} cannot be written ({error.strerror}): fetch to a directory that can.") from error
    return place


def _write(place: Path, data: bytes) -> None:
    if place.exists():
        if place.read_bytes() != data:
            raise InvalidInput(f"{place} is there already and is another file: fetch to another directory.")
        return
    place.parent.mkdir(parents=True, exist_ok=True)
    temporary = place.with_name(f".{secrets.token_hex(8)}")
    temporary.write_bytes(data)
    temporary.replace(place)


def _listed(job: Job, files: list[File]) -> Page:
    data = [_data(file) for file in files]
    if not files:
        return Page(data, [f"No frame of job {job.id} has left a file."])
    rows = [
        (file.layer.name, file.frame, file.kept.name, file.pointer.size, file.pointer.sha256.hex()[:16])
        for file in files
    ]
    return Page(data, [Table(("layer", "frame", "artifact", "bytes", "sha256"), rows)])


def _fetched(files: list[File], places: list[Path], to: Path) -> Page:
    data = [_data(file) | {"path": str(place)} for file, place in zip(files, places, strict=True)]
    total = sum(file.pointer.size for file in files)
    return Page(data, [f"Fetched {several(len(files), 'file')} to {to}, {several(total, 'byte')} in all."])


def _data(file: File) -> dict[str, object]:
    return {
        "layer": file.layer.name,
        "frame": file.frame,
        "attempt": file.kept.attempt,
        "name": file.kept.name,
        "bytes": file.pointer.size,
        "sha256": file.pointer.sha256.hex(),
    }
