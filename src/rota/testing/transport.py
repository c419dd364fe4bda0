"""In-memory replacement of the HTTP client: the API of workflows and runs only."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Final, TypeVar
from urllib.parse import unquote
from uuid import UUID

import msgspec

from rota.api.workflows import RerunSpec, RollbackResult, RunChangeResult, RunSpec, WorkflowSummary
from rota.model.errors import InvalidInput, NotEnded
from rota.model.workflows.dry_run import dry_run_workflow
from rota.model.workflows.run_state import CancelRun, InboxMessage, PauseRun, ResumeRun
from rota.model.workflows.spec import WorkflowSpec
from rota.sdk.payload import encode_value

if TYPE_CHECKING:
    from rota.client.connections import TasksByName
    from rota.testing.in_memory import Rehearsal

T = TypeVar("T")
NOT_SIMULATED: Final = (
    "The in-memory backend supports only jobs and workflows: do not use shows, events and the like in the test."
)
_RUN_COMMANDS: Final[Mapping[str, InboxMessage]] = {
    "cancel": CancelRun("Cancelled by a test."),
    "pause": PauseRun(),
    "resume": ResumeRun(),
}


class InMemoryHttpClient:
    """Replaces `rota.client.http.HttpClient`."""

    def __init__(self, rehearsal: Rehearsal, tasks: TasksByName) -> None:
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
        **_http_options: object,
    ) -> T:
        """Answers as a server would; values are encoded and decoded."""
        parts = [unquote(part) for part in path.split("/")[1:]]
        answer = self._answer(method, parts, query or {}, b"" if body is msgspec.UNSET else encode_value(body))
        if method == "POST":
            await self._rehearsal.submitted_more()
        return msgspec.msgpack.decode(encode_value(answer), type=kind)

    async def long_poll(self, path: str, kind: type[T], _within_s: float, is_done: Callable[[T], bool]) -> T:
        answer = await self.call("GET", path, kind)
        if not is_done(answer):
            raise NotEnded(
                f"The run has not ended in a test, it is {getattr(answer, 'state', '')}: call drain() to run"
                " due work, clock.advance() to move time."
            )
        return answer

    def stream(self, *_args: object, **_kwargs: object) -> Any:
        raise InvalidInput(NOT_SIMULATED)

    def _answer(self, method: str, parts: list[str], query: Mapping[str, object], body: bytes) -> object:
        match method, parts:
            case "GET", ["workflows"]:
                return {"items": self._workflow_lines()}
            case "POST", ["workflows"]:
                return self._runs.declare(msgspec.msgpack.decode(body, type=WorkflowSpec))
            case "POST", ["workflows", show, name, "runs"]:
                spec = msgspec.msgpack.decode(body, type=RunSpec)
                return self._runs.start(self._tasks, show, name, spec.input, spec.version, spec.key)
            case "POST", ["workflows", show, name, "dry-run"]:
                spec = msgspec.msgpack.decode(body, type=RunSpec)
                return dry_run_workflow(self._runs.definition(show, name, spec.version)[1], spec.input)
            case "GET", ["runs"]:
                return {"items": self._list_runs(query)}
            case _, ["runs", run, *what]:
                return self._answer_for_run(UUID(run), what, body)
        raise InvalidInput(NOT_SIMULATED)

    def _answer_for_run(self, run: UUID, what: list[str], body: bytes) -> object:
        found = self._runs.find(run)
        match what:
            case []:
                return found.to_view()
            case ["timeline"]:
                return {"items": found.history}
            case ["saga"]:
                return found.saga()
            case ["rollback"]:
                return RollbackResult(found.id, self._runs.roll_back(run))
            case ["rerun"]:
                return self._runs.rerun(run, msgspec.msgpack.decode(body, type=RerunSpec).step)
            case [command] if command in _RUN_COMMANDS:
                changed = self._runs.deliver(run, _RUN_COMMANDS[command])
                return RunChangeResult(found.id, found.state, changed)
        raise InvalidInput(NOT_SIMULATED)

    def _workflow_lines(self) -> list[WorkflowSummary]:
        lines = []
        for (show, name), version, flow in self._runs.latest_definitions():
            running = sum(run.flow.spec.name == name and not run.state.ended for run in self._runs.all())
            lines.append(WorkflowSummary(show, name, version, len(flow.steps), running, flow.spec.description))
        return lines

    def _list_runs(self, query: Mapping[str, object]) -> list[Any]:
        views = [run.to_view() for run in self._runs.all()]
        return [
            run
            for run in views
            if query.get("workflow") in (None, run.workflow)
            and query.get("show") in (None, run.show)
            and str(query.get("state") or run.state).upper() == run.state
        ]
