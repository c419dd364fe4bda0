"""pytest fixtures, registered by the installation of Rota: nothing has to be imported or configured."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from rota.infra.extras import needs_extra

if TYPE_CHECKING:
    from rota.testing.in_memory import Rehearsal


@pytest.fixture
def rota_inline() -> Iterator[Rehearsal]:
    """Jobs submitted in the test run during `submit`."""
    with needs_extra("server", "rota.testing"):
        from rota.testing import inline

    with inline() as rehearsal:
        yield rehearsal


@pytest.fixture
def rota_manual() -> Iterator[Rehearsal]:
    """Jobs submitted in the test wait for `drain`."""
    with needs_extra("server", "rota.testing"):
        from rota.testing import manual

    with manual() as rehearsal:
        yield rehearsal
