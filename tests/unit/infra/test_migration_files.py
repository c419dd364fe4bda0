"""Discovery, order and validation of migration files, and their comparison with applied migrations."""

import re
from datetime import UTC, datetime
from pathlib import Path

import pytest

from rota.infra.postgres.migrate import AppliedMigration, compare, pending
from rota.infra.postgres.migration_files import (
    FUNCTIONS_REVISION,
    checksum_of,
    discover,
    discover_functions,
    read_migration,
    sort_and_validate,
)
from rota.model.errors import MigrationRefused


def make_migrations(*names, text="SELECT 1;\n"):
    return sort_and_validate(read_migration(f"{name}.sql", text) for name in names)


def applied_migration(migration, checksum=None):
    when = datetime(2026, 1, 2, tzinfo=UTC)
    return AppliedMigration(migration.number, migration.phase, migration.name, checksum or migration.checksum, when)


def names(migrations):
    return [migration.name for migration in migrations]


def test_shipped_migrations_are_numbered_without_gaps():
    found = discover()
    assert [migration.number for migration in found] == list(range(1, len(found) + 1))
    assert found[0].name == "0001_pre_postgres_baseline"


def test_shipped_migrations_are_read_once_and_cached():
    assert discover() is discover()


def test_migrations_are_found_in_every_package_and_ordered_by_number(tmp_path):
    for package, name in (("b", "0001_pre_one"), ("a/deep", "0002_post_two")):
        directory = tmp_path / package / "migrations"
        directory.mkdir(parents=True)
        (directory / f"{name}.sql").write_text("SELECT 1;\n")
    (tmp_path / "a" / "query.sql").write_text("-- Not a migration.\nSELECT 1\n")
    assert names(discover(tmp_path)) == ["0001_pre_one", "0002_post_two"]


def test_gap_in_numbers_is_refused_and_named():
    with pytest.raises(MigrationRefused, match="migration 0002 before 0003_pre_c is missing"):
        make_migrations("0001_pre_a", "0003_pre_c")


def test_duplicate_number_is_refused_with_both_names():
    with pytest.raises(MigrationRefused, match="0002_post_b and 0002_pre_c"):
        make_migrations("0001_pre_a", "0002_post_b", "0002_pre_c")


@pytest.mark.parametrize("name", ["1_pre_a.sql", "0001_mid_a.sql", "0001_pre_A.sql", "0001_pre_.sql"])
def test_misnamed_migration_file_is_refused(name):
    with pytest.raises(MigrationRefused, match=name):
        read_migration(name, "SELECT 1")


def test_checksum_ignores_line_endings_only():
    unix = read_migration("0001_pre_a.sql", "SELECT 1;\nSELECT 2;\n")
    assert read_migration("0001_pre_a.sql", "SELECT 1;\r\nSELECT 2;\r\n").checksum == unix.checksum
    assert read_migration("0001_pre_a.sql", "SELECT 1;\nSELECT  2;\n").checksum != unix.checksum


def test_no_transaction_header_runs_the_file_outside_a_transaction():
    assert not read_migration(
        "0001_pre_a.sql", "-- no transaction\nCREATE INDEX CONCURRENTLY x ON y (z)"
    ).in_transaction
    assert read_migration("0001_pre_a.sql", "SELECT 1 -- no transaction").in_transaction


def test_pending_lists_the_migrations_of_the_phase():
    known = make_migrations("0001_pre_a", "0002_post_b", "0003_pre_c")
    assert names(pending(known, [], "all")) == ["0001_pre_a", "0002_post_b", "0003_pre_c"]
    assert names(pending(known, [], "pre")) == ["0001_pre_a", "0003_pre_c"]
    assert names(pending(known, [applied_migration(known[0]), applied_migration(known[2])], "post")) == ["0002_post_b"]
    assert pending(known, [applied_migration(migration) for migration in known], "all") == []


def test_post_phase_is_refused_while_an_earlier_pre_migration_is_pending():
    known = make_migrations("0001_pre_a", "0002_post_b", "0003_pre_c")
    with pytest.raises(MigrationRefused, match="0001_pre_a"):
        pending(known, [], "post")
    assert names(pending(known, [applied_migration(known[0])], "post")) == ["0002_post_b"]


def test_edited_migration_is_refused_and_named():
    known = make_migrations("0001_pre_a", "0002_pre_b")
    with pytest.raises(MigrationRefused, match="0001_pre_a was edited after it was applied on 2026-01-02"):
        pending(known, [applied_migration(known[0], checksum="another")], "all")


def test_database_of_a_newer_rota_is_refused():
    known = make_migrations("0001_pre_a", "0002_pre_b")
    with pytest.raises(MigrationRefused, match=r"newer version of Rota \(0002_pre_b"):
        pending(known[:1], [applied_migration(migration) for migration in known], "all")


def test_status_compares_files_with_applied_migrations():
    known = make_migrations("0001_pre_a", "0002_pre_b", "0003_post_c", "0004_pre_d")
    applied = [
        applied_migration(known[0]),
        applied_migration(known[1], checksum="another"),
        applied_migration(known[3]),
    ]
    lines = compare(known[:3], applied)
    assert [(line.name, line.state) for line in lines] == [
        ("0001_pre_a", "applied"),
        ("0002_pre_b", "edited"),
        ("0003_post_c", "pending"),
        ("0004_pre_d", "unknown"),
    ]


LOCK = Path(__file__).with_name("schema.lock")


def locked():
    """Expected text of schema.lock: one line per migration, and one for all functions with their revision."""
    functions = checksum_of("".join(each.name + each.checksum for each in discover_functions()))
    lines = [f"{migration.name} {migration.checksum}" for migration in discover()]
    return "\n".join([*lines, f"functions revision {FUNCTIONS_REVISION} {functions}"]) + "\n"


def test_merged_migrations_never_change_and_changed_functions_raise_their_revision():
    """Add a line for a new migration; for changed functions raise FUNCTIONS_REVISION and replace the last line.

    `python -c "from tests.unit.infra.test_migration_files import locked; print(locked(), end='')"` prints the file.
    """
    *old, old_functions = LOCK.read_text().splitlines()
    *new, new_functions = locked().splitlines()
    assert new[: len(old)] == old, "a merged migration was changed or removed: add a new one"
    assert len(new) == len(old), "a new migration: add its line to schema.lock"
    if old_functions != new_functions:
        assert old_functions.split()[2] != new_functions.split()[2], "functions changed: raise FUNCTIONS_REVISION"
        pytest.fail("update the last line of schema.lock")


def test_statements_of_function_files_are_repeatable():
    for file in discover_functions():
        assert not re.search(r"^CREATE (?!OR REPLACE)", file.text, re.MULTILINE), file.name
