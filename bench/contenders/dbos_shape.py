"""What is raced: how many steps in a row, and how many at once."""

from __future__ import annotations

SHAPE = "BENCH_SHAPE"
"""In the environment: linear or fan."""
STEPS = 10
WIDTH = 100
