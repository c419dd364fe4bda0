"""Commands print text literally: no markup, no emoji, no control characters."""

import pytest

from rota.cli.core.output import print_line, print_table, print_text


@pytest.mark.parametrize("text", ["run:ok: pending", "[bold]x[/bold]", "a:smiley:b", "1234567890 'quoted' /a/path"])
def test_printed_text_is_literal(capsys, text):
    print_text(text)
    print_line(text)
    print_table(("what",), [(text,)])
    assert [each.strip() for each in capsys.readouterr().out.splitlines()] == [text, text, "what", text]
