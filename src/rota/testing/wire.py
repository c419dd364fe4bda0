"""The API of a rehearsal, as far as it is played: workflows and their runs, asked about as servers are asked."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Final, TypeVar
from urllib.parse import unquote
from uuid import UUID

import msgspec

from rota.model.errors import InvalidInput, NotEnded
from rota.model.workflow import WorkflowSpec
from rota.model.workflow_dry import dry_run
from rota.model.workflow_run import Cancel, News, Pause, Resume
from rota.model.workflow_views import From, RolledBack, RunChanged, RunSpec, WorkflowLine
from rota.sdk.payload import encoded

if TYPE_CHECKING:
    from rota.sdk.clients import Tasks
    from rota.testing.rehearsal import Rehearsal

T = TypeVar("T")
NOT_PLAYED: Final = "A rehearsal plays jobs and workflows alone: leave shows, events and the like out of the test."
_ASKED: Final[Mapping[str, News]] = {"cancel": Cancel("Cancelled by a test."), "pause": Pause(), "resume": Resume()}


class PlayedWire:
    """In the place of `rota.sdk.wire.Wire`."""

    def __init__(self, rehearsal: Rehearsal, tasks: Tasks) -> None:
        self._rehearsal = rehearsal
        self._runs = rehearsal.runs
        self._tasks = tasks

    async def call(
        self,
        method: str,
        path: str,
        kind: type[T],
        *,
        query: Mapping[str, object] | None = None,
        body: object = msgspec.UNSET,
        **_of_a_wire: object,
    ) -> T:
        """What a server would answer, which goes the way it goes from there."""
        parts = [unquote(part) for part in path.split("/")[1:]]
        answer = self._answered(method, parts, query or {}, b"" if body is msgspec.UNSET else encoded(body))
        if method == "POST":
            await self._rehearsal.submitted_more()
        return msgspec.msgpack.decode(encoded(answer), type=kind)

    async def waited(self, path: str, kind: type[T], _within_s: float, over: Callable[[T], bool]) -> T:
        found = await self.call("GET", path, kind)
        if not over(found):
            raise NotEnded(
                f"The run has not ended in a test, it is {getattr(found, 'state', '')}: drain() runs what is due, and"
                " clock.advance() brings the rest nearer."
            )
        return found

    def stream(self, *_args: object, **_kwargs: object) -> Any:
        raise InvalidInput(NOT_PLAYED)

    def _answered(self, method: str, parts: list[str], query: Mapping[str, object], body: bytes) -> object:
        match method, parts:
            case "GET", ["workflows"]:
                return {"items": self._definitions()}
            case "POST", ["workflows"]:
                return self._runs.declare(msgspec.msgpack.decode(body, type=WorkflowSpec))
            case "POST", ["workflows", show, name, "runs"]:
                given = msgspec.msgpack.decode(body, type=RunSpec)
                return self._runs.start(self._tasks, show, name, given.input, given.version, given.key)
            case "POST", ["workflows", show, name, "dry-run"]:
                given = msgspec.msgpack.decode(body, type=RunSpec)
                return dry_run(self._runs.definition(show, name, given.version)[1], given.input)
            case "GET", ["runs"]:
                return {"items": self._listed(query)}
            case _, ["runs", run, *what]:
                return self._of_run(UUID(run), what, body)
        raise InvalidInput(NOT_PLAYED)

    def _of_run(self, run: UUID, what: list[str], body: bytes) -> object:
        found = self._runs.find(run)
        match what:
            case []:
                return found.told()
            case ["timeline"]:
                return {"items": found.history}
            case ["saga"]:
                return found.saga()
            case ["rollback"]:
                return RolledBack(found.id, self._runs.roll_back(run))
            case ["rerun"]:
                return self._runs.rerun(run, msgspec.msgpack.decode(body, type=From).step)
            case [word] if word in _ASKED:
                changed = self._runs.hear(run, _ASKED[word])
                return RunChanged(found.id, found.state, changed)
        raise InvalidInput(NOT_PLAYED)

    def _definitions(self) -> list[WorkflowLine]:
        lines = []
        for (show, name), version, flow in self._runs.latest():
            running = sum(run.flow.spec.name == name and not run.state.ended for run in self._runs.all())
            lines.append(WorkflowLine(show, name, version, len(flow.steps), running, flow.spec.description))
        return lines

    def _listed(self, query: Mapping[str, object]) -> list[Any]:
        told = [run.told() for run in self._runs.all()]
        return [
            run
            for run in told
            if query.get("workflow") in (None, run.workflow)
            and query.get("show") in (None, run.show)
            and str(query.get("state") or run.state).upper() == run.state
        ]
