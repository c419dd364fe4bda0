"""docs/reference/settings.md matches the code."""

from __future__ import annotations

from pathlib import Path

from rota.model.settings import leaves
from tools.docs.settings_reference import page

PAGE = Path(__file__).parents[3] / "docs" / "reference" / "settings.md"
REMEDY = "regenerate it: python -c 'from tools.docs.settings_reference import page; print(page(), end=\"\")' > " + str(
    PAGE
)


def test_settings_page_is_up_to_date():
    assert PAGE.read_text() == page(), REMEDY


def test_settings_page_lists_every_setting_and_every_variable():
    text = page()
    for path, leaf in leaves().items():
        section, _, name = path.rpartition(".")
        assert f"| `{name}` |" in text.split(f"\n## {section}\n")[1].split("\n## ")[0]
        assert all(f"`{env}`" in text for env in leaf.env_names)


def test_settings_page_cells_do_not_break_the_table():
    rows = [line for line in page().splitlines() if line.startswith("|")]
    assert {row.replace("\\|", "").count("|") for row in rows} == {6}
