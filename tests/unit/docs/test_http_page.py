"""docs/reference/http.md matches the code."""

from pathlib import Path

from rota.server.http.app import litestar_app
from rota.server.http.permissions import route_table
from tools.docs.http_reference import render_page

PAGE = Path(__file__).parents[3] / "docs" / "reference" / "http.md"
REMEDY = (
    "regenerate it: python -c 'from tools.docs.http_reference import render_page;"
    f' print(render_page(), end="")\' > {PAGE}'
)


def test_http_page_is_up_to_date():
    assert PAGE.read_text() == render_page(), REMEDY


def test_http_page_lists_every_route():
    text = render_page()
    for route in route_table(litestar_app()):
        assert f"### `{route.method} {route.path.removeprefix('/api/v1')}`\n" in text


def test_http_page_defines_every_schema_it_links():
    text = render_page()
    named = {part.partition(")")[0] for part in text.split("](#")[1:]}
    there = {line.removeprefix("### ").lower() for line in text.splitlines() if line.startswith("### ")}
    assert named <= there
