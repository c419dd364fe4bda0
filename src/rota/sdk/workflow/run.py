"""Handles of workflow runs, and the workflows resource: `run = await trip.start(...)`, `app.workflows`.

A handle holds only the id of a run. Waiting has no effect on the run, nor has a wait that is interrupted. A start whose
reply is lost is retried under the same idempotency key, so it never starts two runs.
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
    WorkflowRunView,
    WorkflowSummary,
)
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
"""Duration of one long poll."""
_pack = msgspec.msgpack.Encoder().encode


class RunHandle(ApiResource[M], Generic[M, R]):
    """`await run.result()` returns the output of its workflow."""

    def __init__(self, app: Rota, mode: type[M], run: RunId, read: ResultDecoder[R], *, already: bool = False) -> None:
        super().__init__(app, cast("Any", mode))
        self.id = run
        self.already = already
        """Whether the run existed before, under the same idempotency key."""
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
        """The blocking handle."""
        return RunHandle(self._app, SyncMode, self.id, self._read, already=self.already)

    @property
    def unsync(self) -> RunHandle[AsyncMode, R]:
        """The async handle."""
        return RunHandle(self._app, AsyncMode, self.id, self._read, already=self.already)

    @api_method
    async def get(self) -> WorkflowRunView:
        """The full record of the run, with its steps."""
        return await self._request("GET", self._path(), WorkflowRunView)

    @api_method
    async def state(self) -> RunState:
        return (await self._request("GET", self._path(), WorkflowRunView)).state

    @api_method
    async def wait(self, timeout: float | None = None) -> RunState:
        """Waits for the end and returns the final state; raises `NotEnded` after `timeout` seconds."""
        return (await self._wait_until_ended(timeout)).state

    @api_method
    async def result(self, timeout: float | None = None) -> R:
        """Waits for the output; raises `RunNotSucceeded` if the run did not succeed."""
        view = await self._wait_until_ended(timeout)
        if view.state is not RunState.SUCCEEDED:
            raise _failure(view)
        try:
            return self._read(_pack(view.output))
        except msgspec.DecodeError as error:
            raise InvalidInput(
                f"The output of run {self.id} does not match the return type of its workflow: {error}."
            ) from error

    @api_method
    async def timeline(self) -> Sequence[RunTimelineEntry]:
        """The history of the run, in order."""
        return await self._list(self._path("timeline"), RunTimelineEntry)

    @api_method
    async def saga(self) -> SagaView:
        """Compensations, last first, with their states."""
        return await self._request("GET", self._path("saga"), SagaView)

    @api_method
    async def explain(self) -> RunExplanation:
        """What the run waits for, next change first, with remedies; or how it ended."""
        from rota.api.run_explanation import RunExplanation

        return await self._request("GET", self._path("explain"), RunExplanation)

    @api_method
    async def cancel(self) -> bool:
        """Stops running steps and rolls back if the workflow says so. Returns False if the run had ended."""
        return (await self._request("POST", self._path("cancel"), RunChangeResult)).changed

    @api_method
    async def pause(self) -> bool:
        """Starts no further steps; running ones continue. Returns False if the run had ended."""
        return (await self._request("POST", self._path("pause"), RunChangeResult)).changed

    @api_method
    async def resume(self) -> bool:
        """Returns False if the run had ended."""
        return (await self._request("POST", self._path("resume"), RunChangeResult)).changed

    @api_method
    async def rerun(self, from_step: Step[Any] | str) -> RunHandle[M, R]:
        """Starts a new run at `from_step`, reusing earlier steps of this run, which must have ended."""
        step = from_step.id if isinstance(from_step, Step) else from_step
        started = await self._request(
            "POST", self._path("rerun"), RunStartResult, idempotent=False, body=RerunSpec(step=step)
        )
        return RunHandle(self._app, self._mode, started.run, self._read)

    @api_method
    async def rollback(self) -> int:
        """Runs the compensations of an ended run that are not done. Returns their number."""
        return (await self._request("POST", self._path("rollback"), RollbackResult)).entries

    def _path(self, *what: str) -> str:
        return url_path("runs", str(self.id), *what)

    async def _wait_until_ended(self, timeout: float | None) -> WorkflowRunView:
        until = None if timeout is None else time.monotonic() + timeout
        while True:
            wait_s = LONG_POLL_S if until is None else min(LONG_POLL_S, max(0.0, until - time.monotonic()))
            view = await wait_for_run(self._app, self.id, wait_s)
            if view.state.ended:
                return view
            if until is not None and time.monotonic() >= until:
                raise NotEnded(
                    f"Run {self.id} has not ended within {timeout:g} s, it is {view.state}: wait longer, or call"
                    " explain() to see why.",
                    run=str(self.id),
                )


Run = RunHandle[AsyncMode, R]
"""A run with async calls."""
SyncRun = RunHandle[SyncMode, R]
"""A run with blocking calls."""


class WorkflowsResource(ApiResource[M]):
    """Workflows of the whole installation, of all apps."""

    @api_method
    async def list(self) -> Sequence[WorkflowSummary]:
        """The latest version of every workflow."""
        return await self._list("/workflows", WorkflowSummary)

    @api_method
    async def declare(self, spec: WorkflowSpec) -> WorkflowDeclareResult:
        """Stores a definition; if it differs from the latest, as a new version. Existing runs keep theirs."""
        return await declare_workflow(self._app, spec)

    @api_method
    async def start(
        self, name: str, given: dict[str, Any] | None = None, *, show: str = "", version: int = 0, key: str = ""
    ) -> RunHandle[M, Any]:
        """Starts a run by workflow name, in the latest version or the given one."""
        started = await start_run(self._app, show or self._app.show, name, given or {}, version=version, key=key)
        return self._run_handle(started.run, already=started.already)

    @api_method
    async def dry_run(
        self, name: str, given: dict[str, Any] | None = None, *, show: str = "", version: int = 0
    ) -> WorkflowDryRun:
        """The inputs of a run and the possible order of its steps. Starts nothing."""
        path = url_path("workflows", show or self._app.show, name, "dry-run")
        return await self._request("POST", path, WorkflowDryRun, body=RunSpec(input=given or {}, version=version))

    @api_method
    async def runs(
        self, *, show: str = "", workflow: str = "", state: RunState | str = "", most: int = 50
    ) -> Sequence[WorkflowRunSummary]:
        """Newest first; runs that match all given criteria."""
        query = {"show": show or None, "workflow": workflow or None, "state": str(state) or None}
        return await self._list("/runs", WorkflowRunSummary, most=most, **query)

    def _run_handle(self, run: RunId, *, already: bool) -> RunHandle[M, Any]:
        mode: Any = SyncMode if self._is_sync else AsyncMode
        return RunHandle(self._app, mode, run, msgspec.msgpack.decode, already=already)


async def declare_workflow(app: Rota, spec: WorkflowSpec) -> WorkflowDeclareResult:
    return await http_client_of(app).call("POST", "/workflows", WorkflowDeclareResult, idempotent=True, body=spec)


async def start_run(
    app: Rota, show: str, name: str, given: dict[str, Any], *, version: int = 0, key: str = ""
) -> RunStartResult:
    """Generates an idempotency key if the caller has none, so that a lost reply does not start two runs."""
    spec = RunSpec(input=given, version=version, key=key or f"sdk-{uuid4()}")
    started = await http_client_of(app).call(
        "POST", url_path("workflows", show, name, "runs"), RunStartResult, idempotent=True, body=spec
    )
    return started if key else msgspec.structs.replace(started, already=False)


async def wait_for_run(app: Rota, run: RunId, within_s: float) -> WorkflowRunView:
    """Waits for the end of the run for at most `within_s`; returns its current state."""
    return await http_client_of(app).long_poll(
        url_path("runs", str(run)), WorkflowRunView, within_s, lambda view: view.state.ended
    )


def _failure(view: WorkflowRunView) -> RunNotSucceeded:
    failed = next((step for step in view.steps if step.state.value == view.state.value), None)
    return RunNotSucceeded(
        f"Run {view.id} of {view.workflow} ended as {view.state}: {view.error or 'it gave no reason.'}",
        run=view.id,
        state=view.state.value,
        step=failed.id if failed is not None else "",
        error=view.error or "",
    )
