"""The policy: check a text, test it on cases, simulate it on past jobs, explain a decision, reload the file.

The policy covers every show, so a key needs its role in every show.
"""

from __future__ import annotations

import asyncio

from litestar import Controller, get, post
from litestar.params import JSONBody

from rota.api.pages import Page
from rota.api.policy import (
    PolicyCheckRequest,
    PolicyExplainRequest,
    PolicyReloadReply,
    PolicySimulateRequest,
    PolicyTestRequest,
)
from rota.engine.admission.policy_queries import (
    JobPolicyExplanation,
    PolicyQueries,
    PolicySimulation,
    job_policy_explanation,
    kernel_from_text,
    submission_policy_request,
)
from rota.model.access import Role
from rota.model.errors import InvalidInput, Refused
from rota.policy.file_watch import request_reload
from rota.policy.kernel import PolicyKernel
from rota.policy.lint import PolicyLintReport, lint_policy
from rota.policy.policy_tests import PolicyTestReport, run_cases
from rota.policy.snapshots import PolicySnapshot
from rota.server.http.codec import ApiRequest
from rota.server.http.dependencies import HttpDependencies
from rota.server.http.permissions import Deps, requires

OPERATE, ADMIN = requires(Role.OPERATOR, "everywhere"), requires(Role.ADMIN, "everywhere")


class PolicyRoutes(Controller):
    path = "/policy"
    tags = ("policy",)

    @post("/check", opt=OPERATE, status_code=200)
    async def check_policy(self, data: JSONBody[PolicyCheckRequest]) -> PolicyLintReport:
        """Check a policy text; an error names the line."""
        return await asyncio.to_thread(lint_policy, data.policy)

    @post("/test", opt=OPERATE, status_code=200)
    async def test_policy(self, data: JSONBody[PolicyTestRequest]) -> PolicyTestReport:
        """Test a policy on cases with expected decisions."""
        return await asyncio.to_thread(run_cases, data.policy, data.cases)

    @post("/simulate", opt=OPERATE, status_code=200)
    async def simulate_policy(self, deps: Deps, data: JSONBody[PolicySimulateRequest]) -> PolicySimulation:
        """List recent jobs that a policy would have decided differently. Counts against no rate limit."""
        return await PolicyQueries(deps.database).simulate(data.policy, data.hours, data.limit)

    @post("/explain", opt=OPERATE, status_code=200)
    async def explain_policy(self, deps: Deps, data: JSONBody[PolicyExplainRequest]) -> JobPolicyExplanation:
        """Explain which rules match a job, and which one decides."""
        kernel = _kernel(deps) if data.policy is None else await asyncio.to_thread(kernel_from_text, data.policy)
        if (data.job is None) == (data.submission is None):
            raise InvalidInput("The request needs either a job or a submission: send one of them.")
        if data.submission is not None:
            policy_request = submission_policy_request(data.submission)
            return job_policy_explanation(policy_request, await kernel.explain(policy_request, data.snapshot))
        assert data.job is not None
        return await PolicyQueries(deps.database).explain(kernel, data.job, data.snapshot)

    @get("/snapshots", opt=OPERATE)
    async def list_snapshots(self, deps: Deps) -> Page[PolicySnapshot]:
        """List the last ten policies of this server or its kernel, the current one first."""
        return Page(await deps.kernel.list_snapshots() if isinstance(deps.kernel, PolicyKernel) else [])

    @post("/reload", opt=ADMIN, status_code=200)
    async def reload_policy(self, request: ApiRequest, deps: Deps) -> PolicyReloadReply:
        """Reload the policy file on this and every other server. An invalid file changes nothing."""
        kernel = _kernel(deps)
        changed = await kernel.reload()
        [current, *_] = await kernel.list_snapshots()
        await request_reload(deps.database, request.user.audited)
        return PolicyReloadReply(changed=changed, snapshot=current.id)


def _kernel(deps: HttpDependencies) -> PolicyKernel:
    if not isinstance(deps.kernel, PolicyKernel):
        raise Refused("No policy is configured: set policy.file or safety_kernel.addr.")
    return deps.kernel
