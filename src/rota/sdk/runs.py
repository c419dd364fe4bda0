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

from rota.model.errors import InvalidInput, NotEnded, RunNotSucceeded
from rota.model.ids import RunId
from rota.model.workflow import WorkflowSpec
from rota.model.workflow_dry import DryRun
from rota.model.workflow_run import RunState
from rota.model.workflow_views import (
    Declared,
    From,
    Moment,
    RolledBack,
    RunChanged,
    RunLine,
    RunSpec,
    Saga,
    Started,
    WorkflowLine,
)
from rota.model.workflow_views import Run as Told
from rota.sdk.rooms import Awaits, M, Room, Waits, at, call, wire_of
from rota.sdk.steps import Step

if TYPE_CHECKING:
    from rota.sdk.app import Rota
    from rota.workflow.explain_told import RunExplained

R = TypeVar("R")
Read = Callable[[bytes], R]
WAIT_S: Final = 30.0
"""How long one question for the end of a run may take."""
_pack = msgspec.msgpack.Encoder().encode


class RunOf(Room[M], Generic[M, R]):
    """`await run.result()` is what its workflow returned."""

    def __init__(self, app: Rota, mode: type[M], run: RunId, read: Read[R], *, already: bool = False) -> None:
        super().__init__(app, cast("Any", mode))
        self.id = run
        self.already = already
        """Whether it was there before, under the same key."""
        self._read = read
        self._mode: type[M] = mode

    def __repr__(self) -> str:
        return f"<run {self.id}>"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RunOf) and other.id == self.id

    def __hash__(self) -> int:
        return hash(self.id)

    @property
    def sync(self) -> RunOf[Waits, R]:
        """The same, for code without an event loop."""
        return RunOf(self._app, Waits, self.id, self._read, already=self.already)

    @property
    def unsync(self) -> RunOf[Awaits, R]:
        """The same, for code that awaits."""
        return RunOf(self._app, Awaits, self.id, self._read, already=self.already)

    @call
    async def get(self) -> Told:
        """All that is known of it, with its steps."""
        return await self._ask("GET", self._at(), Told)

    @call
    async def state(self) -> RunState:
        return (await self._ask("GET", self._at(), Told)).state

    @call
    async def wait(self, timeout: float | None = None) -> RunState:
        """The state in which it ended; `NotEnded` when that takes longer than so many seconds."""
        return (await self._ended(timeout)).state

    @call
    async def result(self, timeout: float | None = None) -> R:
        """What it returned; `RunNotSucceeded` if it did not succeed."""
        told = await self._ended(timeout)
        if told.state is not RunState.SUCCEEDED:
            raise _failure(told)
        try:
            return self._read(_pack(told.output))
        except msgspec.DecodeError as error:
            raise InvalidInput(
                f"What run {self.id} returned is not what its workflow is said to return: {error}."
            ) from error

    @call
    async def timeline(self) -> Sequence[Moment]:
        """Everything that happened to it, in order."""
        return await self._list(self._at("timeline"), Moment)

    @call
    async def saga(self) -> Saga:
        """What it has to undo, the last first, and what has become of that."""
        return await self._ask("GET", self._at("saga"), Saga)

    @call
    async def explain(self) -> RunExplained:
        """What it waits for, what changes first at first, with what would help; or how it ended."""
        from rota.workflow.explain_told import RunExplained

        return await self._ask("GET", self._at("explain"), RunExplained)

    @call
    async def cancel(self) -> bool:
        """Whether it had not ended. What runs is stopped; what it did is undone if its workflow says so."""
        return (await self._ask("POST", self._at("cancel"), RunChanged)).changed

    @call
    async def pause(self) -> bool:
        """Whether it had not ended. No further step begins; those under way go on."""
        return (await self._ask("POST", self._at("pause"), RunChanged)).changed

    @call
    async def resume(self) -> bool:
        """Whether it had not ended."""
        return (await self._ask("POST", self._at("resume"), RunChanged)).changed

    @call
    async def rerun(self, from_step: Step[Any] | str) -> RunOf[M, R]:
        """A new run from a step on, with what came before taken over from this one, which has ended."""
        step = from_step.id if isinstance(from_step, Step) else from_step
        told = await self._ask("POST", self._at("rerun"), Started, again=False, body=From(step=step))
        return RunOf(self._app, self._mode, told.run, self._read)

    @call
    async def rollback(self) -> int:
        """Undo what it did, now that it has ended, or what could not be undone before; how many jobs that are."""
        return (await self._ask("POST", self._at("rollback"), RolledBack)).entries

    def _at(self, *what: str) -> str:
        return at("runs", str(self.id), *what)

    async def _ended(self, timeout: float | None) -> Told:
        until = None if timeout is None else time.monotonic() + timeout
        while True:
            left_s = WAIT_S if until is None else min(WAIT_S, max(0.0, until - time.monotonic()))
            told = await ended(self._app, self.id, left_s)
            if told.state.ended:
                return told
            if until is not None and time.monotonic() >= until:
                raise NotEnded(
                    f"Run {self.id} has not ended within {timeout:g} s, it is {told.state}: wait for longer, or ask"
                    " what it waits for with explain().",
                    run=str(self.id),
                )


Run = RunOf[Awaits, R]
"""A run whose calls are awaited."""
SyncRun = RunOf[Waits, R]
"""A run whose calls wait."""


class Workflows(Room[M]):
    """Of the whole installation, whichever app declares them."""

    @call
    async def list(self) -> Sequence[WorkflowLine]:
        """Every workflow in its latest version."""
        return await self._list("/workflows", WorkflowLine)

    @call
    async def declare(self, spec: WorkflowSpec) -> Declared:
        """Make a definition known; one that differs from the latest is a new version. Runs keep theirs."""
        return await declared(self._app, spec)

    @call
    async def start(
        self, name: str, given: dict[str, Any] | None = None, *, show: str = "", version: int = 0, key: str = ""
    ) -> RunOf[M, Any]:
        """A run of a workflow by its name, in its latest version or another."""
        told = await started(self._app, show or self._app.show, name, given or {}, version=version, key=key)
        return self._run(told.run, already=told.already)

    @call
    async def dry_run(
        self, name: str, given: dict[str, Any] | None = None, *, show: str = "", version: int = 0
    ) -> DryRun:
        """What a run would be given, and in which order its steps may begin. Nothing is started."""
        path = at("workflows", show or self._app.show, name, "dry-run")
        return await self._ask("POST", path, DryRun, body=RunSpec(input=given or {}, version=version))

    @call
    async def runs(
        self, *, show: str = "", workflow: str = "", state: RunState | str = "", most: int = 50
    ) -> Sequence[RunLine]:
        """The newest first; those that agree with all that is given."""
        wanted = {"show": show or None, "workflow": workflow or None, "state": str(state) or None}
        return await self._list("/runs", RunLine, most=most, **wanted)

    def _run(self, run: RunId, *, already: bool) -> RunOf[M, Any]:
        mode: Any = Waits if self._waits else Awaits
        return RunOf(self._app, mode, run, msgspec.msgpack.decode, already=already)


async def declared(app: Rota, spec: WorkflowSpec) -> Declared:
    return await wire_of(app).call("POST", "/workflows", Declared, again=True, body=spec)


async def started(
    app: Rota, show: str, name: str, given: dict[str, Any], *, version: int = 0, key: str = ""
) -> Started:
    """Under a key of ours if the caller has none, so that a lost answer does not start another."""
    spec = RunSpec(input=given, version=version, key=key or f"sdk-{uuid4()}")
    told = await wire_of(app).call("POST", at("workflows", show, name, "runs"), Started, again=True, body=spec)
    return told if key else msgspec.structs.replace(told, already=False)


async def ended(app: Rota, run: RunId, within_s: float) -> Told:
    """The run once it has ended, or as it is after so long at most."""
    return await wire_of(app).waited(at("runs", str(run)), Told, within_s, lambda told: told.state.ended)


def _failure(told: Told) -> RunNotSucceeded:
    failed = next((step for step in told.steps if step.state.value == told.state.value), None)
    return RunNotSucceeded(
        f"Run {told.id} of {told.workflow} ended as {told.state}: {told.error or 'it gave no reason.'}",
        run=told.id,
        state=told.state.value,
        step=failed.id if failed is not None else "",
        error=told.error or "",
    )
