"""How much a test tries: enough for every change in `make test`, all of it in `make soak` (ROTA_TEST_EFFORT=full)."""

import os

FULL = os.environ.get("ROTA_TEST_EFFORT") == "full"


def effort(some, full):
    """`some` of it in `make test`, the `full` number in `make soak`."""
    return full if FULL else some
