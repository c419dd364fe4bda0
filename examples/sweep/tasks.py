"""A small sweep of learning rates. Each frame trains one model with exclusive use of a GPU, on preemptible machines
that may be lost."""

from __future__ import annotations

import math
import random

from rota import Fatal, Retry, Rota, context

app = Rota()


@app.task(gpus=1, retries=2)
def train(rate: float, steps: int = 200) -> dict[str, float]:
    """Logistic regression on linearly separable points; returns the loss."""
    now = context()
    if now.frame % 3 == 1 and now.attempt == 1:
        raise Retry("this machine was taken away", after=0.05)
    now.log(f"on GPU {', '.join(map(str, now.gpus))}")
    points = _points()
    w = [0.0, 0.0, 0.0]
    for step in range(steps):
        for x, y, label in points:
            error = label - _sigmoid(w[0] * x + w[1] * y + w[2])
            w = [w[0] + rate * error * x, w[1] + rate * error * y, w[2] + rate * error]
        if step % 50 == 0:
            now.progress(100 * step / steps, "training")
    if not all(map(math.isfinite, w)):
        raise Fatal(f"a rate of {rate} is too high")
    return {"rate": rate, "loss": round(_loss(points, w), 4)}


def _points() -> list[tuple[float, float, int]]:
    chance = random.Random(7)  # noqa: S311 - the same points for every model
    drawn = [(chance.uniform(-1, 1), chance.uniform(-1, 1)) for _ in range(60)]
    return [(x, y, int(x + 2 * y + chance.gauss(0, 0.3) > 0.1)) for x, y in drawn]


def _sigmoid(z: float) -> float:
    return 1 / (1 + math.exp(-max(-60.0, min(60.0, z))))


def _loss(points: list[tuple[float, float, int]], w: list[float]) -> float:
    found = [(_sigmoid(w[0] * x + w[1] * y + w[2]), label) for x, y, label in points]
    return -sum(math.log(max(1e-9, p if label else 1 - p)) for p, label in found) / len(points)
