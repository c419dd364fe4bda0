"""PostgreSQL commits in commit order, read from the WAL through a logical slot with `test_decoding`.

Only a slot shows the commit order; reading rows shows only some intermediate states. `begin` needs a private server,
because it changes `wal_level` and restarts it.
"""

import re

from tests.chaos.pipeline.history import Booked, CapSet, Claimed, Granted, LedgerSeeded, OwnerDied, Released
from tests.support.queue import sql

SLOT = "commits"
MAKE = sql(f"SELECT pg_create_logical_replication_slot('{SLOT}', 'test_decoding')")
DROP = sql(f"SELECT pg_drop_replication_slot('{SLOT}')")
TABLES = "proc|subscription|folder_resource|point|job_resource|layer_resource|show|lease|queue_owners"
READ = sql(f"""
SELECT (lsn - '0/0')::bigint AS at, data FROM pg_logical_slot_peek_changes('{SLOT}', NULL, NULL, 'include-xids', '0')
WHERE data LIKE 'COMMIT%'
   OR data ~ '^table rota\\.({TABLES}):'
   OR data ~ '^table rota\\.queue_claims_[0-9]+: INSERT'""")
ADVANCE = sql(f"SELECT pg_replication_slot_advance('{SLOT}', '0/0'::pg_lsn + $1::bigint)")
TABLE = re.compile(r"table rota\.(\w+?)(?:_\d+)?: (INSERT|UPDATE|DELETE): (.*)", re.DOTALL)
COLUMN = re.compile(r"(\w+)\[[^\]]+\]:('(?:[^']|'')*'|\S+)")
LEVELS = {
    "sub": "pk_alloc",
    "folder": "pk_folder",
    "job": "pk_job",
    "layer": "pk_layer",
    "point": "pk_dept",
}
CAPS = {
    "subscription": ("sub", "pk_alloc", "int_burst"),
    "folder_resource": ("folder", "pk_folder", "int_max_cores"),
    "point": ("point", "pk_dept", "int_max_cores"),
    "job_resource": ("job", "pk_job", "int_max_cores"),
    "layer_resource": ("layer", "pk_layer", "int_max_cores"),
}


async def begin(database, server):
    """Enable logical decoding; restarts the server once."""
    await database.run(sql("ALTER SYSTEM SET wal_level = 'logical'"))
    await server.stop()
    await server.restart()


async def make(database):
    await database.rows(MAKE)


async def read(database, managed, after=0):
    """Commits after log position `after`, and the position of the last one; `managed` are the managed shows.

    They are read again until `confirm`: a reply may be lost, and what was only read must not be lost with it.
    """
    commits, commit = [], []
    for row in await database.rows(READ):
        if row["data"].startswith("COMMIT"):
            if row["at"] > after:
                after = row["at"]
                commits += [commit] if commit else []
            commit = []
        elif (change := _change(row["data"], managed)) is not None:
            commit.append(change)
    return commits, after


async def confirm(database, position):
    """What was read up to this position is not needed any more."""
    await database.rows(ADVANCE, position)


def _change(line, managed):
    found = TABLE.match(line)
    if not found:
        return None
    table, action, rest = found[1], found[2], found[3]
    # An update that changes its key lists the old key first.
    values = {name: value.strip("'") for name, value in COLUMN.findall(rest.rpartition("new-tuple: ")[2])}
    if action == "DELETE":
        return Released(int(values["token"])) if table == "proc" else None
    if table in CAPS:
        return _cap_set(table, values)
    match table:
        case "proc" if action == "INSERT":
            return booked(values, managed)
        case "show":
            return LedgerSeeded(values["pk_show"], int(values["int_founded"]))
        case "lease":
            return Granted(values["name"], int(values["fence"]))
        case "queue_owners":
            return OwnerDied(int(values["owner"])) if values["dead"] == "true" else None
        case "queue_claims" if int(values["owner"]) > 0:
            return Claimed(int(values["owner"]))
    return None


def booked(values, managed):
    """A `proc` row with its columns as text."""
    show = values["pk_show"]
    keys = tuple((level, _key(level, show, values[column])) for level, column in LEVELS.items())
    cores, fence = int(values["int_cores_reserved"]), int(values["int_fence"])
    return Booked(int(values["token"]), show, keys, cores, fence, show in managed)


def _cap_set(table, values):
    level, column, cap = CAPS[table]
    cores = int(values[cap])
    unlimited = cores <= 0 and table != "subscription"
    return CapSet((level, _key(level, values["pk_show"], values[column])), None if unlimited else cores)


def _key(level, show, id_):
    """Pools and departments are shared between shows, but their caps are per show."""
    return f"{show}/{id_}" if level in ("sub", "point") else id_
