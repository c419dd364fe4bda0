"""Databases for tests: a few per process, emptied after each test and reused.

Copying the template costs 60 to 200 ms, and a new connection compiles every PL/pgSQL function again: 0.4 s for a
replica. So `DatabasePool` lends a database, empties its tables after the test, and keeps the connections that the test
closed (see `connections`). A database whose schema was changed or that has a leaked session is dropped instead, so that
a test never sees changes of another one.
"""

import contextlib
import itertools
import os
import time

import psycopg
from psycopg import sql

from tests.support.waiting import CLOSED_WITHIN_S, until_closed

NUMBERS = itertools.count()

# For few rows DELETE is faster than TRUNCATE, because it creates no files; TRUNCATE is faster with many dead rows.
EMPTY = """
DO $$
DECLARE
    item record;
    filled boolean;
BEGIN
    PERFORM set_config('session_replication_role', 'replica', true);  -- no triggers, no foreign keys
    FOR item IN
        SELECT format('rota.%I', relname) AS name, pg_relation_size(oid) AS size FROM pg_class
        WHERE relnamespace = 'rota'::regnamespace AND relkind = 'r' AND relname <> 'migration'
          AND pg_relation_size(oid) > 0
    LOOP
        IF item.size > 131072 THEN
            EXECUTE format('TRUNCATE %s CASCADE', item.name);
        ELSE
            EXECUTE format('SELECT EXISTS (SELECT FROM ONLY %s)', item.name) INTO filled;
            IF filled THEN
                EXECUTE format('DELETE FROM ONLY %s', item.name);
            END IF;
        END IF;
    END LOOP;
END $$"""

# Everything except rows: two databases with the same fingerprint differ only in rows and sequences.
FINGERPRINT = """
SELECT string_agg(part, ' ' ORDER BY part) FROM (
    SELECT 'class ' || count(*) || ' ' || sum(hashtext(concat(c.oid, relname, relkind, relpersistence, reloptions,
           relacl, relrowsecurity, relnatts, relchecks, relhastriggers))::bigint)
    FROM pg_class c JOIN pg_namespace n ON n.oid = relnamespace WHERE nspname !~ '^pg_|^information_schema$'
    UNION ALL SELECT 'proc ' || count(*) || ' ' || sum(hashtext(concat(oid, prosrc, proconfig, proacl))::bigint)
    FROM pg_proc WHERE oid >= 16384
    UNION ALL SELECT 'trigger ' || count(*) || ' ' || sum(hashtext(concat(oid, tgenabled))::bigint) FROM pg_trigger
    UNION ALL SELECT 'constraint ' || count(*) || ' ' || sum(hashtext(concat(oid, convalidated))::bigint)
    FROM pg_constraint WHERE oid >= 16384
    UNION ALL SELECT 'index ' || count(*) FROM pg_index WHERE NOT indisvalid
    UNION ALL SELECT 'default ' || count(*) || ' ' || sum(hashtext(adbin::text)::bigint) FROM pg_attrdef
    UNION ALL SELECT 'namespace ' || count(*) FROM pg_namespace WHERE nspname !~ '^pg_(toast_)?temp'
    UNION ALL SELECT 'column ' || count(*) || ' ' || sum(hashtext(concat(attrelid, attnum, attname, atttypid,
           attnotnull, attacl))::bigint) FROM pg_attribute WHERE attrelid >= 16384
    UNION ALL SELECT 'rewrite ' || count(*) || ' ' || sum(hashtext(ev_action::text)::bigint)
    FROM pg_rewrite WHERE oid >= 16384
    UNION ALL SELECT 'type ' || count(*) FROM pg_type WHERE oid >= 16384
    UNION ALL SELECT 'setting ' || count(*) || ' ' || sum(hashtext(setconfig::text)::bigint) FROM pg_db_role_setting
    WHERE setdatabase = (SELECT oid FROM pg_database WHERE datname = current_database())
    UNION ALL SELECT 'migration ' || count(*) || ' ' || sum(hashtext(m::text)::bigint) FROM rota.migration m
) AS parts (part)"""

SEQUENCES = (
    "SELECT format('rota.%I', sequencename), last_value, start_value FROM pg_sequences WHERE schemaname = 'rota'"
)
TABLES = """
SELECT oid::bigint, format('rota.%%I', relname) FROM pg_class
WHERE relnamespace = 'rota'::regnamespace AND relkind IN ('r', 'p')"""
ADDED = f"SELECT name FROM ({TABLES}) AS now (oid, name) WHERE oid <> ALL (%s::bigint[])"
SESSIONS = """
SELECT pid, application_name, state, query FROM pg_stat_activity
WHERE datname = %s AND pid <> ALL (%s) AND application_name <> 'rota tests'"""


class DatabasePool:
    """Databases of one process. `lend` returns one equal to the template; `take_back` checks and empties it."""

    def __init__(self, admin, stack, connections, template):
        self._admin = admin
        self._template_name = template
        self._stack = stack
        self._connections = connections
        self._idle = []
        self._template = None
        self._cleaners = {}
        """One cleanup session per database, because opening a session costs more than the cleanup."""

    def lend(self, *, new=False):
        return self._idle.pop() if self._idle and not new else self._make()

    def take_back(self, name):
        """Empty the database for the next test; drops it and fails if the test left a session open."""
        leaked = self._leaked_sessions(name)
        if leaked:
            self.drop(name)
            raise AssertionError(f"connections to PostgreSQL left behind: {leaked}")
        if self._emptied(self._cleaner(name)):
            self._idle.append(name)
        else:
            self.drop(name)

    def drop(self, name):
        self._connections.forget(self._stack.database_url(name))
        if cleaner := self._cleaners.pop(name, None):
            cleaner.close()
        self._admin.execute(sql.SQL("DROP DATABASE {} WITH (FORCE)").format(sql.Identifier(name)))

    def close(self):
        while self._idle:
            self.drop(self._idle.pop())

    def _make(self):
        name = make_database(self._admin, self._template_name)
        if self._template is None:
            self._template = Template.of(self._cleaner(name))
        return name

    def _cleaner(self, name):
        cleaner = self._cleaners.get(name)
        if cleaner is None or cleaner.broken or cleaner.closed:
            url = self._stack.database_url(name)
            cleaner = psycopg.connect(url, autocommit=True, prepare_threshold=1, application_name="rota tests")
            cleaner.execute("SET lock_timeout = '1s'")
            self._cleaners[name] = cleaner
        return cleaner

    def _leaked_sessions(self, name):
        """Sessions that are not pooled and are still open after the close timeout."""
        deadline = time.monotonic() + CLOSED_WITHIN_S
        kept = self._connections.pids(self._stack.database_url(name))
        while found := self._admin.execute(SESSIONS, [name, kept]).fetchall():
            if time.monotonic() > deadline:
                break
            time.sleep(0.002)
        return found

    def _emptied(self, connection):
        try:
            for (table,) in connection.execute(ADDED, [self._template.tables]).fetchall():
                connection.execute(f"DROP TABLE IF EXISTS {table} CASCADE")
            if connection.execute(FINGERPRINT).fetchone()[0] != self._template.fingerprint:
                return False
            connection.execute(EMPTY)
            self._template.restore(connection)
        except psycopg.Error:
            return False  # the database is dropped, so the next test is not affected
        return True


class Template:
    """The initial state of a migrated database: its rows and sequence values."""

    def __init__(self, fingerprint, tables, rows, sequences):
        self.fingerprint = fingerprint
        self.tables = tables
        self.rows = rows
        self.sequences = sequences

    @classmethod
    def of(cls, connection):
        rows = {}
        tables = connection.execute(TABLES, []).fetchall()
        for _, table in tables:
            (found,) = connection.execute(f"SELECT json_agg(t)::text FROM {table} t").fetchone()
            if found is not None and table != "rota.migration":
                rows[table] = found
        fingerprint = connection.execute(FINGERPRINT).fetchone()[0]
        sequences = {name: rest for name, *rest in connection.execute(SEQUENCES).fetchall()}
        return cls(fingerprint, [oid for oid, _ in tables], rows, sequences)

    def restore(self, connection):
        with connection.transaction():
            connection.execute("SET LOCAL session_replication_role = replica")
            for table, rows in self.rows.items():
                values = f"json_populate_recordset(NULL::{table}, %s)"
                connection.execute(f"INSERT INTO {table} OVERRIDING SYSTEM VALUE SELECT * FROM {values}", [rows])
            for name, *state in connection.execute(SEQUENCES).fetchall():
                if state != self.sequences[name]:
                    last, start = self.sequences[name]
                    connection.execute("SELECT setval(%s, %s, %s)", [name, last or start, last is not None])


def make_database(admin, template):
    name = f"test_{os.environ.get('PYTEST_XDIST_WORKER', 'main')}_{next(NUMBERS)}"
    # Copying files is faster than the default strategy; PostgreSQL 14 has no STRATEGY option.
    strategy = "STRATEGY FILE_COPY" if admin.info.server_version >= 150000 else ""
    admin.execute(f"CREATE DATABASE {name} TEMPLATE {template} {strategy}")
    return name


@contextlib.contextmanager
def fresh_database(admin, stack, template):
    """URL of a private database, dropped afterwards; fails if a session is left open."""
    name = make_database(admin, template)
    try:
        yield stack.database_url(name)
        until_closed(lambda: not admin.execute(SESSIONS, [name, []]).fetchall(), "PostgreSQL")
    finally:
        admin.execute(f"DROP DATABASE {name} WITH (FORCE)")
