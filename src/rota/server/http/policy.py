"""The policy: whether a text is one, what it says of cases and of past jobs, why a job was decided so, and reading it
anew. It concerns every show, so a key needs its role in every show.
"""

from __future__ import annotations

import asyncio

import msgspec
from litestar import Controller, get, post
from litestar.params import JSONBody

from rota.engine.policy_desk import HOURS, JOBS, PolicyDesk, Simulated, Why, asked_about, kernel_by, why
from rota.model.access import Role
from rota.model.errors import InvalidInput, Refused
from rota.model.ids import JobId
from rota.model.job import Submission
from rota.policy.cases import Tested, tried
from rota.policy.checking import Checked, checked
from rota.policy.kernel import PolicyKernel
from rota.policy.snapshots import Snapshot
from rota.policy.watch import nudge
from rota.server.http.desk import Desk
from rota.server.http.pages import Page
from rota.server.http.routes import AtDesk, needs
from rota.server.http.wire import Ask

OPERATE, ADMIN = needs(Role.OPERATOR, "everywhere"), needs(Role.ADMIN, "everywhere")


class PolicyText(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    policy: str
    """What stands in a policy file."""


class PolicyCases(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    policy: str
    cases: str
    """What stands in a file of cases."""


class PolicyPast(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    policy: str
    hours: float = HOURS
    """How far back."""
    limit: int = JOBS
    """Jobs at most."""


class PolicyQuestion(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """About a job that is stored, or a submission as it would be made; by the policy in force, one of the last ten, or
    this text."""

    job: JobId | None = None
    submission: Submission | None = None
    snapshot: str = ""
    policy: str | None = None


class Reloaded(msgspec.Struct, frozen=True, kw_only=True):
    changed: bool
    snapshot: str


class PolicyRoutes(Controller):
    path = "/policy"
    tags = ("policy",)

    @post("/check", opt=OPERATE, status_code=200)
    async def check_policy(self, data: JSONBody[PolicyText]) -> Checked:
        """Whether it is a policy; if not, the answer names the line."""
        return await asyncio.to_thread(checked, data.policy)

    @post("/test", opt=OPERATE, status_code=200)
    async def test_policy(self, data: JSONBody[PolicyCases]) -> Tested:
        """Whether it says of each case what is expected."""
        return await asyncio.to_thread(tried, data.policy, data.cases)

    @post("/simulate", opt=OPERATE, status_code=200)
    async def simulate_policy(self, desk: AtDesk, data: JSONBody[PolicyPast]) -> Simulated:
        """Of which jobs of the last hours it would have said something else. Counts nothing."""
        return await PolicyDesk(desk.database).simulate(data.policy, data.hours, data.limit)

    @post("/explain", opt=OPERATE, status_code=200)
    async def explain_policy(self, desk: AtDesk, data: JSONBody[PolicyQuestion]) -> Why:
        """Which rules are for a job, and which decides."""
        kernel = _kernel(desk) if data.policy is None else await asyncio.to_thread(kernel_by, data.policy)
        if (data.job is None) == (data.submission is None):
            raise InvalidInput("Ask about a job or about a submission.")
        if data.submission is not None:
            asked = asked_about(data.submission)
            return why(asked, await kernel.explain(asked, data.snapshot))
        assert data.job is not None
        return await PolicyDesk(desk.database).explain(kernel, data.job, data.snapshot)

    @get("/snapshots", opt=OPERATE)
    async def list_snapshots(self, desk: AtDesk) -> Page[Snapshot]:
        """The last ten policies of this server or its kernel, the one in force first."""
        return Page(await desk.kernel.listed() if isinstance(desk.kernel, PolicyKernel) else [])

    @post("/reload", opt=ADMIN, status_code=200)
    async def reload_policy(self, request: Ask, desk: AtDesk) -> Reloaded:
        """Read the policy file anew, here and on every other server. A file that is wrong changes nothing."""
        kernel = _kernel(desk)
        changed = await kernel.reload()
        [now, *_] = await kernel.listed()
        await nudge(desk.database, request.user.audited)
        return Reloaded(changed=changed, snapshot=now.id)


def _kernel(desk: Desk) -> PolicyKernel:
    if not isinstance(desk.kernel, PolicyKernel):
        raise Refused("There is no policy here: set policy.file or safety_kernel.addr.")
    return desk.kernel
