"""A process that looks into outputs, or lets one out; started with a fault armed it dies on the way.

    python -m tests.integration.outputs_client scan quarantine | scan redact | release TOKEN | redact TOKEN

URL says where.
"""

import asyncio
import os
import sys

from rota.accounting.books import Books
from rota.engine.finish import Finisher
from rota.engine.outputs import Outputs
from rota.engine.outputs_desk import Decider, OutputDesk
from rota.engine.outputs_scanner import Scanner
from rota.infra.postgres import Database, PostgresTarget
from rota.infra.store import Store
from rota.infra.telemetry import logs
from rota.model.output import OutputSays
from rota.policy.output.judging import OutputPolicy
from rota.policy.output.rules import OutputMatch, OutputRule, OutputRules
from rota.queue import Queue


async def scan(database, says):
    rule = OutputRule(id="r", decision=OutputSays(says.upper()), match=OutputMatch(scanners=("secret",)))
    policy = OutputPolicy(OutputRules(rules=(rule,)))
    parts = Outputs(lambda: policy, "client")
    finisher = Finisher(database, Queue(database), Books(database, None))
    scanner = Scanner(database, Store(database), finisher, parts)
    while await scanner.step():
        pass


async def release(database, token):
    await OutputDesk(database, Store(database), Queue(database)).release(int(token), Decider("bob", ("bob",)), "fine")


async def redact(database, token):
    await OutputDesk(database, Store(database), Queue(database)).redact(int(token), Decider("bob", ("bob",)), "fine")


async def main(what, about):
    database = await Database.open(PostgresTarget(url=os.environ["URL"]))
    await {"scan": scan, "release": release, "redact": redact}[what](database, about)
    await database.close()


if __name__ == "__main__":
    logs.configure()
    asyncio.run(main(*sys.argv[1:]))
