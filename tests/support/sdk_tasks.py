"""Typed sync tasks, for workers that run them in separate processes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pydantic

from rota import Rota

app = Rota(show="film")


@dataclass
class Camera:
    lens: float
    film: Path


class Scene(pydantic.BaseModel):
    cameras: dict[str, Camera]


@app.task(topic="default")
def lenses(scene: Scene, *more: Camera) -> list[Camera]:
    return [*scene.cameras.values(), *more]


@app.task(topic="default")
def breaks(why: str) -> None:
    raise LookupError(why)
