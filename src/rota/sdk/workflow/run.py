"""Runs of workflows, and what an installation has of both: `run = await trip.start(...)`, `app.workflows`.

Nothing is kept here of a run but its id. Waiting changes nothing; whoever stops waiting leaves the run as it is. A run
whose start was not answered is asked for again under the same key, so it never becomes two.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final, Generic, TypeVar, cast
from uuid import uuid4

import msgspec

from rota.api.workflows import (
    RerunSpec,
    RollbackResult,
    RunChangeResult,
    RunSpec,
    RunStartResult,
    RunTimelineEntry,
    SagaView,
    WorkflowDeclareResult,
    WorkflowRunSummary,
    WorkflowSummary,
)
from rota.api.workflows import WorkflowRunView as Told
from rota.client.resource import ApiResource, AsyncMode, M, SyncMode, api_method, http_client_of, url_path
from rota.model.errors import InvalidInput, NotEnded, RunNotSucceeded
from rota.model.ids import RunId
from rota.model.workflows.dry_run import WorkflowDryRun
from rota.model.workflows.run_state import RunState
from rota.model.workflows.spec import WorkflowSpec
from rota.sdk.workflow.builder import Step

if TYPE_CHECKING:
    from rota.api.run_explanation import RunExplanation
    from rota.sdk.app import Rota

R = TypeVar("R")
ResultDecoder = Callable[[bytes], R]
LONG_POLL_S: Final = 30.0
"""How long one question for the end of a run may take."""
_pack = msgspec.msgpack.Encoder().encode


class RunHandle(ApiResource[M], Generic[M, R]):
    """`await run.result()` is what its workflow returned."""

    def __init__(self, app: Rota, mode: type[M], run: RunId, read: ResultDecoder[R], *, already: bool = False) -> None:
        super().__init__(app, cast("Any", mode))
        self.id = run
        self.already = already
        """Whether it was there before, under the same key."""
        self._read = read
        self._mode: type[M] = mode

    def __repr__(self) -> str:
        return f"<run {self.id}>"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RunHandle) and other.id == self.id

    def __hash__(self) -> int:
        return hash(self.id)

    @property
    def sync(self) -> RunHandle[SyncMode, R]:
        """The same, for code without an event loop."""
        return RunHandle(self._app, SyncMode, self.id, self._read, already=self.already)

    @property
    def unsync(self) -> RunHandle[AsyncMode, R]:
        """The same, for code that awaits."""
        return RunHandle(self._app, AsyncMode, self.id, self._read, already=self.already)

    @api_method
    async def get(self) -> Told:
        """All that is known of it, with its steps."""
        return await self._request("GET", self._path(), Told)

    @api_method
    async def state(self) -> RunState:
        return (await self._request("GET", self._path(), Told)).state

    @api_method
    async def wait(self, timeout: float | None = None) -> RunState:
        """The state in which it ended; `NotEnded` when that takes longer than so many seconds."""
        return (await self._wait_until_ended(timeout)).state

    @api_method
    async def result(self, timeout: float | None = None) -> R:
        """What it returned; `RunNotSucceeded` if it did not succeed."""
        told = await self._wait_until_ended(timeout)
        if told.state is not RunState.SUCCEEDED:
            raise _failure(told)
        try:
            return self._read(_pack(told.output))
        except msgspec.DecodeError as error:
            raise InvalidInput(
                f"What run {self.id} returned is not what its workflow is said to return: {error}."
            ) from error

    @api_method
    async def timeline(self) -> Sequence[RunTimelineEntry]:
        """Everything that happened to it, in order."""
        return await self._list(self._path("timeline"), RunTimelineEntry)

    @api_method
    async def saga(self) -> SagaView:
        """What it has to undo, the last first, and what has become of that."""
        return await self._request("GET", self._path("saga"), SagaView)

    @api_method
    async def explain(self) -> RunExplanation:
        """What it waits for, what changes first at first, with what would help; or how it ended."""
        from rota.api.run_explanation import RunExplanation

        return await self._request("GET", self._path("explain"), RunExplanation)

    @api_method
    async def cancel(self) -> bool:
        """Whether it had not ended. What runs is stopped; what it did is undone if its workflow says so."""
        return (await self._request("POST", self._path("cancel"), RunChangeResult)).changed

    @api_method
    async def pause(self) -> bool:
        """Whether it had not ended. No further step begins; those under way go on."""
        return (await self._request("POST", self._path("pause"), RunChangeResult)).changed

    @api_method
    async def resume(self) -> bool:
        """Whether it had not ended."""
        return (await self._request("POST", self._path("resume"), RunChangeResult)).changed

    @api_method
    async def rerun(self, from_step: Step[Any] | str) -> RunHandle[M, R]:
        """A new run from a step on, with what came before taken over from this one, which has ended."""
        step = from_step.id if isinstance(from_step, Step) else from_step
        told = await self._request(
            "POST", self._path("rerun"), RunStartResult, idempotent=False, body=RerunSpec(step=step)
        )
        return RunHandle(self._app, self._mode, told.run, self._read)

    @api_method
    async def rollback(self) -> int:
        """Undo what it did, now that it has ended, or what could not be undone before; how many jobs that are."""
        return (await self._request("POST", self._path("rollback"), RollbackResult)).entries

    def _path(self, *what: str) -> str:
        return url_path("runs", str(self.id), *what)

    async def _wait_until_ended(self, timeout: float | None) -> Told:
        until = None if timeout is None else time.monotonic() + timeout
        while True:
            left_s = LONG_POLL_S if until is None else min(LONG_POLL_S, max(0.0, until - time.monotonic()))
            told = await wait_for_run(self._app, self.id, left_s)
            if told.state.ended:
                return told
            if until is not None and time.monotonic() >= until:
                raise NotEnded(
                    f"Run {self.id} has not ended within {timeout:g} s, it is {told.state}: wait for longer, or ask"
                    " what it waits for with explain().",
                    run=str(self.id),
                )


Run = RunHandle[AsyncMode, R]
"""A run whose calls are awaited."""
SyncRun = RunHandle[SyncMode, R]
"""A run whose calls wait."""


class WorkflowsResource(ApiResource[M]):
    """Of the whole installation, whichever app declares them."""

    @api_method
    async def list(self) -> Sequence[WorkflowSummary]:
        """Every workflow in its latest version."""
        return await self._list("/workflows", WorkflowSummary)

    @api_method
    async def declare(self, spec: WorkflowSpec) -> WorkflowDeclareResult:
        """Make a definition known; one that differs from the latest is a new version. Runs keep theirs."""
        return await declare_workflow(self._app, spec)

    @api_method
    async def start(
        self, name: str, given: dict[str, Any] | None = None, *, show: str = "", version: int = 0, key: str = ""
    ) -> RunHandle[M, Any]:
        """A run of a workflow by its name, in its latest version or another."""
        told = await start_run(self._app, show or self._app.show, name, given or {}, version=version, key=key)
        return self._run_handle(told.run, already=told.already)

    @api_method
    async def dry_run(
        self, name: str, given: dict[str, Any] | None = None, *, show: str = "", version: int = 0
    ) -> WorkflowDryRun:
        """What a run would be given, and in which order its steps may begin. Nothing is started."""
        path = url_path("workflows", show or self._app.show, name, "dry-run")
        return await self._request("POST", path, WorkflowDryRun, body=RunSpec(input=given or {}, version=version))

    @api_method
    async def runs(
        self, *, show: str = "", workflow: str = "", state: RunState | str = "", most: int = 50
    ) -> Sequence[WorkflowRunSummary]:
        """The newest first; those that agree with all that is given."""
        wanted = {"show": show or None, "workflow": workflow or None, "state": str(state) or None}
        return await self._list("/runs", WorkflowRunSummary, most=most, **wanted)

    def _run_handle(self, run: RunId, *, already: bool) -> RunHandle[M, Any]:
        mode: Any = SyncMode if self._is_sync else AsyncMode
        return RunHandle(self._app, mode, run, msgspec.msgpack.decode, already=already)


async def declare_workflow(app: Rota, spec: WorkflowSpec) -> WorkflowDeclareResult:
    return await http_client_of(app).call("POST", "/workflows", WorkflowDeclareResult, idempotent=True, body=spec)


async def start_run(
    app: Rota, show: str, name: str, given: dict[str, Any], *, version: int = 0, key: str = ""
) -> RunStartResult:
    """Under a key of ours if the caller has none, so that a lost answer does not start another."""
    spec = RunSpec(input=given, version=version, key=key or f"sdk-{uuid4()}")
    told = await http_client_of(app).call(
        "POST", url_path("workflows", show, name, "runs"), RunStartResult, idempotent=True, body=spec
    )
    return told if key else msgspec.structs.replace(told, already=False)


async def wait_for_run(app: Rota, run: RunId, within_s: float) -> Told:
    """The run once it has ended, or as it is after so long at most."""
    return await http_client_of(app).long_poll(
        url_path("runs", str(run)), Told, within_s, lambda told: told.state.ended
    )


def _failure(told: Told) -> RunNotSucceeded:
    failed = next((step for step in told.steps if step.state.value == told.state.value), None)
    return RunNotSucceeded(
        f"Run {told.id} of {told.workflow} ended as {told.state}: {told.error or 'it gave no reason.'}",
        run=told.id,
        state=told.state.value,
        step=failed.id if failed is not None else "",
        error=told.error or "",
    )
