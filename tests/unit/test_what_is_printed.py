"""What commands print is what they were given: no markup, no pictures, no control characters."""

import pytest

from rota.cli.output import as_table, line, say


@pytest.mark.parametrize("text", ["run:ok: pending", "[bold]x[/bold]", "a:smiley:b", "1234567890 'quoted' /a/path"])
def test_what_is_printed_is_what_was_given(capsys, text):
    say(text)
    line(text)
    as_table(("what",), [(text,)])
    assert [each.strip() for each in capsys.readouterr().out.splitlines()] == [text, text, "what", text]
