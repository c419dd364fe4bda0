"""The loader of `.sql` files, and what every such file in Rota must look like."""

from importlib.resources import files
from pathlib import Path

import pytest

from rota.infra.postgres.sql import parse_query, query

ROOT = Path(str(files("rota")))
QUERIES = sorted(path for path in ROOT.rglob("*.sql") if path.parent.name != "migrations")


def test_a_file_is_taken_apart_into_purpose_and_statement():
    parsed = parse_query("room.count", "-- How many there are.\nSELECT count(*)\nFROM thing;\n")
    assert parsed.purpose == "How many there are."
    assert parsed.text.endswith("SELECT count(*)\nFROM thing")


def test_the_text_names_its_file_for_whoever_reads_pg_stat_activity():
    parsed = parse_query("room.count", "-- How many there are.\nSELECT 1")
    assert parsed.text.startswith("-- room.count: How many there are.\n")


def test_lines_keep_their_numbers_so_that_server_messages_point_into_the_file():
    source = "-- Purpose.\nSELECT 1,\n  2"
    assert parse_query("x", source).text.splitlines()[1:] == source.splitlines()[1:]


@pytest.mark.parametrize("source", ["SELECT 1", "--\nSELECT 1", "-- Purpose only.\n", "", "  -- Indented.\nSELECT 1"])
def test_a_file_without_purpose_or_statement_is_refused(source):
    with pytest.raises(AssertionError):
        parse_query("room.bad", source)


def test_a_query_is_found_beside_its_package_and_read_once():
    found = query("rota.infra.postgres", "migrations_applied")
    assert found.name == "rota.infra.postgres.migrations_applied"
    assert query("rota.infra.postgres", "migrations_applied") is found


def test_a_missing_file_fails_at_import_time():
    with pytest.raises(FileNotFoundError):
        query("rota.infra.postgres", "no_such_query")


@pytest.mark.parametrize("path", QUERIES, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_query_file_says_in_a_sentence_what_it_is_for(path):
    assert parse_query(path.stem, path.read_text()).purpose.endswith(".")


@pytest.mark.parametrize("path", QUERIES, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_query_file_is_used_by_a_module_beside_it(path):
    beside = [module.read_text() for module in path.parent.glob("*.py")]
    assert any(f'query(__package__, "{path.stem}")' in source for source in beside)
