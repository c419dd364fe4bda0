"""Workflow definitions: immutable versions, so that runs keep theirs.

Of two concurrent declarations one hits the unique index and retries. After a lost reply, declaring again finds the same
version.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from hashlib import sha256
from typing import Final

import asyncpg
import msgspec

from rota.api.workflows import WorkflowSummary
from rota.infra import audit, failpoints
from rota.infra.audit import AuditEntry
from rota.infra.postgres import Database, Transaction, query
from rota.model.errors import NotFound, Refused
from rota.model.ids import ShowId
from rota.model.workflows.compiler import CompiledWorkflow, compile_workflow
from rota.model.workflows.spec import WorkflowSpec, decode_workflow, encode_workflow

LATEST = query(__package__, "latest")
DECLARE = query(__package__, "declare")
SPECS = query(__package__, "specs")
LIST = query(__package__, "definitions")

CACHE_MAX: Final = 1000
ATTEMPTS_MAX: Final = 5


class WorkflowVersion(msgspec.Struct, frozen=True):
    """A stored version of a definition."""

    id: int
    show: ShowId
    version: int
    flow: CompiledWorkflow
    made: bool = False


class Definitions:
    def __init__(self, database: Database) -> None:
        self.database = database
        self._compiled: OrderedDict[int, tuple[int, CompiledWorkflow]] = OrderedDict()

    async def declare(self, spec: WorkflowSpec, actor: str) -> WorkflowVersion:
        """Store a definition; returns the latest version if it is identical."""
        flow = compile_workflow(spec)
        data = encode_workflow(spec)
        for _ in range(ATTEMPTS_MAX):
            try:
                return await self._declare(flow, data, actor)
            except asyncpg.UniqueViolationError:
                continue
        raise Refused(f"The workflow {spec.name} is being changed concurrently: declare it again.")

    async def _declare(self, flow: CompiledWorkflow, data: bytes, actor: str) -> WorkflowVersion:
        spec = flow.spec
        async with self.database.transaction() as tx:
            show = await tx.row(LATEST, spec.show, spec.name, 0)
            if show is None:
                raise NotFound(f"There is no show {spec.show[:64]!r} for the workflow {spec.name}: create it first.")
            row = await tx.row(DECLARE, show["pk_show"], spec.name, sha256(data).digest(), data)
            assert row is not None
            if row["made"]:
                what, detail = f"workflow:{spec.show}/{spec.name}", {"show": str(show["pk_show"])}
                await audit.append(tx, [AuditEntry(actor, "workflow.declare", what, detail)])
        failpoints.after_send("workflow.declare")
        return WorkflowVersion(row["pk_workflow"], ShowId(show["pk_show"]), row["version"], flow, row["made"])

    async def find(self, show: str, name: str, version: int = 0, *, on: Transaction | None = None) -> WorkflowVersion:
        """A definition by name, by default the latest version; NotFound if there is none."""
        is_valid = 0 <= version < 2**31 and "\0" not in show + name
        row = await (on or self.database).row(LATEST, show, name, version) if is_valid else None
        if row is None or row["pk_workflow"] is None:
            which = f" of version {version}" if version else ""
            raise NotFound(f"There is no workflow {name[:64]!r}{which} in show {show[:64]!r}: declare it first.")
        flow = self._cache(row["pk_workflow"], row["version"], row["spec"])
        return WorkflowVersion(row["pk_workflow"], ShowId(row["pk_show"]), row["version"], flow)

    async def many(self, ids: Iterable[int], on: Transaction | Database) -> dict[int, tuple[int, CompiledWorkflow]]:
        """Versions and definitions by id; missing ones are left out."""
        requested = set(ids)
        found = {each: self._compiled[each] for each in requested if each in self._compiled}
        if missing := sorted(requested - found.keys()):
            for row in await on.rows(SPECS, missing):
                flow = self._cache(row["pk_workflow"], row["version"], row["spec"])
                found[row["pk_workflow"]] = row["version"], flow
        return found

    def cached(self, number: int) -> CompiledWorkflow | None:
        """A definition in this process's cache."""
        found = self._compiled.get(number)
        return found[1] if found is not None else None

    async def latest(self, shows: Sequence[str] | None = None) -> list[WorkflowSummary]:
        """The latest version of each workflow."""
        rows = await self.database.rows(LIST, shows)
        return [_line(row["show"], row["version"], row["spec"], row["runs"]) for row in rows]

    def _cache(self, number: int, version: int, spec: bytes) -> CompiledWorkflow:
        if number not in self._compiled:
            self._compiled[number] = version, compile_workflow(decode_workflow(spec))
            if len(self._compiled) > CACHE_MAX:
                self._compiled.popitem(last=False)
        return self._compiled[number][1]


def _line(show: str, version: int, data: bytes, runs: int) -> WorkflowSummary:
    spec = decode_workflow(data)
    return WorkflowSummary(show, spec.name, version, len(spec.steps), runs, spec.description)
