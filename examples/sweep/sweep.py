"""Trains one model per learning rate, each on its own GPU, and prints the best."""

from __future__ import annotations

from tasks import train

RATES = [0.001, 0.01, 0.1, 1.0]

if __name__ == "__main__":
    job = train.options(name="sweep", priority="BATCH", labels={"model": "line"}).sync.map(RATES)
    runs = job.result(timeout=60)
    best = min(runs, key=lambda run: run["loss"])
    print(f"{len(runs)} models trained; the best has a rate of {best['rate']} and a loss of {best['loss']}")
