"""pytest fixtures, registered by the installation of Rota: nothing has to be imported or configured."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from rota.testing.in_memory import Rehearsal


@pytest.fixture
def rota_inline() -> Iterator[Rehearsal]:
    """Jobs submitted in the test run during `submit`."""
    from rota.testing import inline

    with inline() as rehearsal:
        yield rehearsal


@pytest.fixture
def rota_manual() -> Iterator[Rehearsal]:
    """Jobs submitted in the test wait for `drain`."""
    from rota.testing import manual

    with manual() as rehearsal:
        yield rehearsal
