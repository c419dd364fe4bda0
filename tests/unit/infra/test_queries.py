"""The loader of named SQL statements, and the rules that every `queries.sql` of Rota follows."""

from importlib.resources import files
from pathlib import Path

import pytest

from rota.infra.postgres.sql import parse_queries, parse_query, queries, query

ROOT = Path(str(files("rota")))
PACKAGES = {
    "rota." + ".".join(path.parent.relative_to(ROOT).parts): path.parent for path in sorted(ROOT.rglob("queries.sql"))
}
QUERIES = [(package, name) for package in PACKAGES for name in queries(package)]


def test_parse_query_splits_purpose_and_statement():
    parsed = parse_query("package.count", "-- How many there are.\nSELECT count(*)\nFROM thing;\n")
    assert parsed.purpose == "How many there are."
    assert parsed.text.endswith("SELECT count(*)\nFROM thing")


def test_query_text_starts_with_its_name_for_pg_stat_activity():
    parsed = parse_query("package.count", "-- How many there are.\nSELECT 1")
    assert parsed.text.startswith("-- package.count: How many there are.\n")


def test_parse_query_keeps_the_lines_of_the_statement():
    source = "-- Purpose.\nSELECT 1,\n  2"
    assert parse_query("x", source).text.splitlines()[1:] == source.splitlines()[1:]


@pytest.mark.parametrize("source", ["SELECT 1", "--\nSELECT 1", "-- Purpose only.\n", "", "  -- Indented.\nSELECT 1"])
def test_parse_query_without_purpose_or_statement_is_refused(source):
    with pytest.raises(AssertionError):
        parse_query("package.bad", source)


@pytest.mark.parametrize(
    "source",
    [
        "-- Purpose.\nSELECT 1\n",
        "-- name: a\n-- Purpose.\nSELECT 1\n\n-- name: a\n-- Purpose.\nSELECT 2\n",
        "-- name: a\nSELECT 1\n",
    ],
)
def test_parse_queries_without_name_or_with_a_name_twice_is_refused(source):
    with pytest.raises(AssertionError):
        parse_queries("package", source)


def test_query_is_loaded_once_and_cached():
    found = query("rota.infra.postgres", "migrations_applied")
    assert found.name == "rota.infra.postgres.migrations_applied"
    assert query("rota.infra.postgres", "migrations_applied") is found


def test_query_with_an_unknown_name_fails():
    with pytest.raises(AssertionError, match="no statement named no_such_query"):
        query("rota.infra.postgres", "no_such_query")


@pytest.mark.parametrize(("package", "name"), QUERIES)
def test_every_statement_states_its_purpose_in_a_sentence(package, name):
    assert query(package, name).purpose.endswith(".")


@pytest.mark.parametrize(("package", "name"), QUERIES)
def test_every_statement_is_used_by_a_module_of_its_package(package, name):
    modules = [module.read_text() for module in PACKAGES[package].glob("*.py")]
    assert any(f'query(__package__, "{name}")' in source for source in modules)
