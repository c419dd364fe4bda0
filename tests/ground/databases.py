"""Databases for tests: a fresh one per test, or one per module that is cleaned between tests.

    shared_database_url = one_database()
    database_url = cleaned_by("TRUNCATE rota.lease")

The second way is for modules where making a database would cost more than the tests. Either way a test must leave no
connection behind.
"""

import itertools
import os

import asyncpg
import pytest

from tests.ground.servers import TEMPLATE
from tests.ground.waiting import until, until_closed

NUMBERS = itertools.count()
OTHERS = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()"


def make_database(admin, stack, template):
    number = f"{os.environ.get('PYTEST_XDIST_WORKER', 'main')}_{next(NUMBERS)}"
    name = f"test_{number}"
    # Copying files is twice as fast as the default, which PostgreSQL 14 does not know by that name.
    strategy = "STRATEGY FILE_COPY" if admin.info.server_version >= 150000 else ""
    admin.execute(f"CREATE DATABASE {name} TEMPLATE {template} {strategy}")
    yield stack.database_url(name)
    sessions = "SELECT application_name, state, query FROM pg_stat_activity WHERE datname = %s"
    try:
        until_closed(lambda: not admin.execute(sessions, [name]).fetchall(), "PostgreSQL")
    finally:
        admin.execute(f"DROP DATABASE {name} WITH (FORCE)")


def one_database():
    @pytest.fixture(scope="module")
    def shared_database_url(_admin, stack):
        yield from make_database(_admin, stack, TEMPLATE)

    return shared_database_url


def cleaned_by(statements):
    @pytest.fixture
    async def database_url(shared_database_url):
        connection = await asyncpg.connect(shared_database_url)
        await connection.execute(statements)
        yield shared_database_url
        await until(lambda: alone(connection), what="closing every connection to the test's database")
        await connection.close()

    return database_url


async def alone(connection):
    return await connection.fetchval(OTHERS) == 0
