"""The policy: whether a text is one, what it says of cases and of past jobs, why a job was decided so, and reading it
anew. It concerns every show, so a key needs its role in every show.
"""

from __future__ import annotations

import asyncio

import msgspec
from litestar import Controller, get, post
from litestar.params import JSONBody

from rota.engine.admission.policy_queries import (
    DEFAULT_HOURS,
    DEFAULT_JOBS,
    JobPolicyExplanation,
    PolicyQueries,
    PolicySimulation,
    job_policy_explanation,
    kernel_from_text,
    submission_policy_request,
)
from rota.model.access import Role
from rota.model.errors import InvalidInput, Refused
from rota.model.ids import JobId
from rota.model.jobs.submission import Submission
from rota.policy.file_watch import request_reload
from rota.policy.kernel import PolicyKernel
from rota.policy.lint import PolicyLintReport, lint_policy
from rota.policy.policy_tests import PolicyTestReport, run_cases
from rota.policy.snapshots import PolicySnapshot
from rota.server.http.codec import ApiRequest
from rota.server.http.dependencies import HttpDependencies
from rota.server.http.pagination import Page
from rota.server.http.permissions import Deps, requires

OPERATE, ADMIN = requires(Role.OPERATOR, "everywhere"), requires(Role.ADMIN, "everywhere")


class PolicyCheckRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    policy: str
    """What stands in a policy file."""


class PolicyTestRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    policy: str
    cases: str
    """What stands in a file of cases."""


class PolicySimulateRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    policy: str
    hours: float = DEFAULT_HOURS
    """How far back."""
    limit: int = DEFAULT_JOBS
    """Jobs at most."""


class PolicyExplainRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """About a job that is stored, or a submission as it would be made; by the policy in force, one of the last ten, or
    this text."""

    job: JobId | None = None
    submission: Submission | None = None
    snapshot: str = ""
    policy: str | None = None


class PolicyReloadReply(msgspec.Struct, frozen=True, kw_only=True):
    changed: bool
    snapshot: str


class PolicyRoutes(Controller):
    path = "/policy"
    tags = ("policy",)

    @post("/check", opt=OPERATE, status_code=200)
    async def check_policy(self, data: JSONBody[PolicyCheckRequest]) -> PolicyLintReport:
        """Whether it is a policy; if not, the answer names the line."""
        return await asyncio.to_thread(lint_policy, data.policy)

    @post("/test", opt=OPERATE, status_code=200)
    async def test_policy(self, data: JSONBody[PolicyTestRequest]) -> PolicyTestReport:
        """Whether it says of each case what is expected."""
        return await asyncio.to_thread(run_cases, data.policy, data.cases)

    @post("/simulate", opt=OPERATE, status_code=200)
    async def simulate_policy(self, desk: Deps, data: JSONBody[PolicySimulateRequest]) -> PolicySimulation:
        """Of which jobs of the last hours it would have said something else. Counts nothing."""
        return await PolicyQueries(desk.database).simulate(data.policy, data.hours, data.limit)

    @post("/explain", opt=OPERATE, status_code=200)
    async def explain_policy(self, desk: Deps, data: JSONBody[PolicyExplainRequest]) -> JobPolicyExplanation:
        """Which rules are for a job, and which decides."""
        kernel = _kernel(desk) if data.policy is None else await asyncio.to_thread(kernel_from_text, data.policy)
        if (data.job is None) == (data.submission is None):
            raise InvalidInput("Ask about a job or about a submission.")
        if data.submission is not None:
            asked = submission_policy_request(data.submission)
            return job_policy_explanation(asked, await kernel.explain(asked, data.snapshot))
        assert data.job is not None
        return await PolicyQueries(desk.database).explain(kernel, data.job, data.snapshot)

    @get("/snapshots", opt=OPERATE)
    async def list_snapshots(self, desk: Deps) -> Page[PolicySnapshot]:
        """The last ten policies of this server or its kernel, the one in force first."""
        return Page(await desk.kernel.list_snapshots() if isinstance(desk.kernel, PolicyKernel) else [])

    @post("/reload", opt=ADMIN, status_code=200)
    async def reload_policy(self, request: ApiRequest, desk: Deps) -> PolicyReloadReply:
        """Read the policy file anew, here and on every other server. A file that is wrong changes nothing."""
        kernel = _kernel(desk)
        changed = await kernel.reload()
        [now, *_] = await kernel.list_snapshots()
        await request_reload(desk.database, request.user.audited)
        return PolicyReloadReply(changed=changed, snapshot=now.id)


def _kernel(desk: HttpDependencies) -> PolicyKernel:
    if not isinstance(desk.kernel, PolicyKernel):
        raise Refused("There is no policy here: set policy.file or safety_kernel.addr.")
    return desk.kernel
