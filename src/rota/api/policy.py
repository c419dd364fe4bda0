"""Requests about the policy: check a text, test it, simulate it, explain a decision. No I/O."""

from __future__ import annotations

from typing import Final

import msgspec

from rota.model.ids import JobId
from rota.model.jobs.submission import Submission

SIMULATED_HOURS_DEFAULT: Final = 24.0
"""How far back past jobs are looked for."""
SIMULATED_JOBS_DEFAULT: Final = 10_000
"""How many are simulated at most."""


class PolicyCheckRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    policy: str
    """The text of a policy file."""


class PolicyTestRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    policy: str
    cases: str
    """The text of a file of test cases."""


class PolicySimulateRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    policy: str
    hours: float = SIMULATED_HOURS_DEFAULT
    """How far back to look."""
    limit: int = SIMULATED_JOBS_DEFAULT
    """Maximum number of jobs."""


class PolicyExplainRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """For a stored job or a hypothetical submission; by the policy in force, one of the last ten snapshots, or
    the text `policy`."""

    job: JobId | None = None
    submission: Submission | None = None
    snapshot: str = ""
    policy: str | None = None


class PolicyReloadReply(msgspec.Struct, frozen=True, kw_only=True):
    changed: bool
    snapshot: str
