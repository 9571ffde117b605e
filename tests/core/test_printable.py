"""Text from outside is escaped before it is shown."""

from __future__ import annotations

import json
import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tmd.core.values.names import wrong_name, wrong_plain
from tmd.core.values.printable import LONGEST, MOST_LINES, ascii_json, printable, printable_lines

ANY = st.text(st.characters(codec=None, categories=None), max_size=40)
BAD = ("\x1b", "\x07", "\x9b", "\u202e", "\u200b", "\u2028", "\ufeff", "\ud800", "\U000e0041")


def harmless(text):
    return all(
        unicodedata.category(c) not in ("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp") for c in text
    )


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("", ""),
        ("plain [bold] \\ text", "plain [bold] \\ text"),
        ("für 日本\u00a0", "für 日本\u00a0"),
        ("\x1b[2J", "\\x1b[2J"),
        ("a\u202eb", "a\\u202eb"),
        ("\x9b\x7f", "\\x9b\\x7f"),
        ("a\r\n\tb", "a\\r\\n\\tb"),
        ("\ud800", "\\ud800"),
        ("\U000e0041", "\\U000e0041"),
    ],
)
def test_an_invisible_character_becomes_an_escape(text, shown):
    assert printable(text) == shown


@given(ANY)
def test_no_terminal_control_character_is_left(text):
    assert harmless(printable(text))
    assert harmless(printable_lines(text).replace("\n", ""))


def test_the_length_is_bounded_and_the_rest_counted():
    assert printable("x" * (LONGEST + 7)) == "x" * LONGEST + "... (7 more characters)"
    many = printable_lines("x\n" * (MOST_LINES + 7))
    assert many.count("\n") == MOST_LINES
    assert "\n... (8 lines left out)\n" in many


@given(ANY)
def test_json_keeps_its_value_without_control_characters(text):
    shown = ascii_json(json.dumps({"text": text}, ensure_ascii=False))

    assert harmless(shown)
    assert json.loads(shown) == {"text": text}


@pytest.mark.parametrize("bad", [*BAD, "\n", " ", "/", "|"])
@pytest.mark.parametrize("wrong", [wrong_name, wrong_plain])
def test_a_name_with_such_a_character_is_refused_and_the_character_shown(wrong, bad):
    why = wrong(f"h1{bad}")

    assert harmless(why)
    assert why.startswith("character 3 is '")
    assert f"'{printable(bad)}'" in why
    assert "allowed are" in why


def test_good_names_pass_and_empty_and_endless_ones_do_not():
    assert [wrong_name(n) for n in ("h1", "gpu-01.example", "knöten#3")] == ["", "", ""]
    assert [wrong_plain(n) for n in ("a_b.c-1",)] == [""]
    assert "is empty" in wrong_name("")
    assert "at most 200" in wrong_name("h" * 201)
