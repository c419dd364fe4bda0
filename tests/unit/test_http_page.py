"""docs/reference/http.md is what the code says."""

from pathlib import Path

from rota.server.http.app import compiled
from rota.server.http.reference import page
from rota.server.http.routes import table

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "http.md"
REMEDY = f"write it anew: python -c 'from rota.server.http.reference import page; print(page(), end=\"\")' > {PAGE}"


def test_the_page_in_docs_is_up_to_date():
    assert PAGE.read_text() == page(), REMEDY


def test_the_page_has_every_route():
    text = page()
    for route in table(compiled()):
        assert f"### `{route.method} {route.path.removeprefix('/api/v1')}`\n" in text


def test_every_shape_that_is_named_is_there():
    text = page()
    named = {part.partition(")")[0] for part in text.split("](#")[1:]}
    there = {line.removeprefix("### ").lower() for line in text.splitlines() if line.startswith("### ")}
    assert named <= there
