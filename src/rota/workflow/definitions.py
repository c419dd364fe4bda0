"""Definitions of workflows: written once for each version, and never changed, so that runs keep theirs.

Two who declare at once: one of them finds that the version is taken, and looks again. If the reply is lost, declaring
again finds the same version.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from hashlib import sha256
from typing import Final

import asyncpg
import msgspec

from rota.infra import audit, faults
from rota.infra.audit import AuditEntry
from rota.infra.postgres import Database, Transaction, query
from rota.model.errors import NotFound, Refused
from rota.model.ids import ShowId
from rota.model.workflow import WorkflowSpec, decode, encode
from rota.model.workflow_check import Flow, compiled
from rota.model.workflow_views import WorkflowLine

LATEST = query(__package__, "latest")
DECLARE = query(__package__, "declare")
SPECS = query(__package__, "specs")
LIST = query(__package__, "definitions")

KEPT: Final = 1000
TRIES: Final = 5


class Version(msgspec.Struct, frozen=True):
    """A definition as runs name it."""

    id: int
    show: ShowId
    version: int
    flow: Flow
    made: bool = False


class Definitions:
    def __init__(self, database: Database) -> None:
        self.database = database
        self._known: OrderedDict[int, tuple[int, Flow]] = OrderedDict()

    async def declare(self, spec: WorkflowSpec, actor: str) -> Version:
        """Make a definition known; the same as the latest version is that version."""
        flow = compiled(spec)
        data = encode(spec)
        for _ in range(TRIES):
            try:
                return await self._declare(flow, data, actor)
            except asyncpg.UniqueViolationError:
                continue
        raise Refused(f"The workflow {spec.name} is being changed by others just now: declare it again.")

    async def _declare(self, flow: Flow, data: bytes, actor: str) -> Version:
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
        faults.reply("workflow.declare")
        return Version(row["pk_workflow"], ShowId(show["pk_show"]), row["version"], flow, row["made"])

    async def find(self, show: str, name: str, version: int = 0, *, on: Transaction | None = None) -> Version:
        """A definition by name, the latest version if none is named; NotFound if there is none."""
        can_be = 0 <= version < 2**31 and "\0" not in show + name
        row = await (on or self.database).row(LATEST, show, name, version) if can_be else None
        if row is None or row["pk_workflow"] is None:
            which = f" of version {version}" if version else ""
            raise NotFound(f"There is no workflow {name[:64]!r}{which} in show {show[:64]!r}: declare it first.")
        flow = self._keep(row["pk_workflow"], row["version"], row["spec"])
        return Version(row["pk_workflow"], ShowId(row["pk_show"]), row["version"], flow)

    async def many(self, ids: Iterable[int], on: Transaction | Database) -> dict[int, tuple[int, Flow]]:
        """Versions and definitions by their ids; those that are gone are left out."""
        wanted = set(ids)
        found = {each: self._known[each] for each in wanted if each in self._known}
        if missing := sorted(wanted - found.keys()):
            for row in await on.rows(SPECS, missing):
                flow = self._keep(row["pk_workflow"], row["version"], row["spec"])
                found[row["pk_workflow"]] = row["version"], flow
        return found

    def known(self, number: int) -> Flow | None:
        """A definition that this process has used lately."""
        found = self._known.get(number)
        return found[1] if found is not None else None

    async def latest(self, shows: Sequence[str] | None = None) -> list[WorkflowLine]:
        """The latest version of each."""
        rows = await self.database.rows(LIST, shows)
        return [_line(row["show"], row["version"], row["spec"], row["runs"]) for row in rows]

    def _keep(self, number: int, version: int, spec: bytes) -> Flow:
        if number not in self._known:
            self._known[number] = version, compiled(decode(spec))
            if len(self._known) > KEPT:
                self._known.popitem(last=False)
        return self._known[number][1]


def _line(show: str, version: int, data: bytes, runs: int) -> WorkflowLine:
    spec = decode(data)
    return WorkflowLine(show, spec.name, version, len(spec.steps), runs, spec.description)
