"""Test effort: reduced in `make test`, full in `make soak` (ROTA_TEST_EFFORT=full)."""

import os

FULL = os.environ.get("ROTA_TEST_EFFORT") == "full"


def effort(some, full):
    """`some` in `make test`, `full` in `make soak`."""
    return full if FULL else some
