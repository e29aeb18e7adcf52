"""A conversation without a terminal: turns, commands, multi-line messages, statistics."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.cli._conversation import COMMANDS, Conversation, MessageReader, Reply, parse_command, strip_control
from shoal.types import Chunk, Usage

PLAIN = st.text(st.characters(exclude_characters='\n"', exclude_categories=["Cs"]), max_size=20)


class TestConversation:
    def test_the_history_precedes_the_question(self) -> None:
        """The system message comes first; a question is part of the history once answered."""
        talk = Conversation("be brief")
        assert [(one.role, one.content) for one in talk.build_messages("a?")] == [
            ("system", "be brief"),
            ("user", "a?"),
        ]
        talk.add_turn("a?", "a.")
        messages = [(one.role, one.content) for one in talk.build_messages("b?")]
        assert messages == [("system", "be brief"), ("user", "a?"), ("assistant", "a."), ("user", "b?")]

    def test_undo_takes_back_question_and_answer(self) -> None:
        """Each undo removes one pair, or nothing if there is none."""
        talk = Conversation()
        talk.add_turn("a?", "a.")
        talk.add_turn("b?", "b.")
        assert talk.undo()
        assert [one.content for one in talk.turns] == ["a?", "a."]
        assert talk.undo()
        assert not talk.undo()

    def test_clear_keeps_the_system_message(self) -> None:
        """The system message is not part of the history."""
        talk = Conversation("be brief")
        talk.add_turn("a?", "a.")
        talk.clear()
        assert [one.content for one in talk.build_messages("b?")] == ["be brief", "b?"]


class TestCommand:
    @pytest.mark.parametrize(
        ("text", "found"),
        [
            ("/clear", ("clear", "")),
            ("/system You are  terse. ", ("system", "You are  terse.")),
            ("/system two\nlines", ("system", "two\nlines")),
            ("/nosuch", ("nosuch", "")),
            ("/etc/hosts holds what?", None),
            (" /clear", None),
            ("/ what", None),
            ("/ABC", None),
            ("what is /clear", None),
        ],
    )
    def test_a_line_that_is_a_slash_and_a_word(self, text: str, found: tuple[str, str] | None) -> None:
        """Paths, and text with a slash elsewhere, are sent to the model."""
        assert parse_command(text) == found

    def test_all_listed_commands_parse(self) -> None:
        """Each is found by its own name."""
        assert {name: parse_command(f"/{name}") for name in COMMANDS} == {name: (name, "") for name in COMMANDS}


class TestLines:
    @given(PLAIN.filter(str.strip))
    def test_a_line_is_a_message(self, line: str) -> None:
        """The line is sent as typed."""
        lines = MessageReader()
        assert lines.push(line) == line
        assert not lines.unfinished

    @given(st.lists(PLAIN, min_size=1, max_size=5).filter(lambda rows: "".join(rows).strip()), st.booleans())
    def test_between_quotes_lines_are_joined(self, rows: list[str], own_lines: bool) -> None:
        """The quotes may be on their own lines; the reader knows that the message continues."""
        text = "\n".join(rows)
        typed = (f'"""\n{text}\n"""' if own_lines else f'"""{text}"""').split("\n")
        lines = MessageReader()
        for line in typed[:-1]:
            assert lines.push(line) is None
            assert lines.unfinished
        assert lines.push(typed[-1]) == text.strip("\n")
        assert not lines.unfinished

    @pytest.mark.parametrize("line", ["", "   ", '""""""', '"""  """'])
    def test_an_empty_line_is_not_a_message(self, line: str) -> None:
        """An empty line is ignored."""
        lines = MessageReader()
        assert lines.push(line) is None
        assert not lines.unfinished

    def test_an_unfinished_turn_can_be_dropped(self) -> None:
        """The next line starts a new message."""
        lines = MessageReader()
        lines.push('"""half')
        lines.drop()
        assert lines.push("whole") == "whole"


class TestReply:
    def reply(self, *times: float) -> Reply:
        ticks = iter(times)
        return Reply(lambda: next(ticks))

    def test_the_speed_is_that_after_the_first_token(self) -> None:
        """The time to the first token is separate; tokens are those of the usage."""
        reply = self.reply(10.0, 10.5, 11.5)
        for chunk in (Chunk(), Chunk(reasoning="hm"), Chunk(text="a b"), Chunk(finish_reason="length")):
            reply.add(chunk)
        reply.add(Chunk(usage=Usage(prompt_tokens=7, completion_tokens=21)))
        assert reply.stats() == "21 tokens, 20.0 per second, first token after 0.50 s, prompt 7 tokens"
        assert (reply.text, reply.finish_reason) == ("a b", "length")

    def test_without_usage_its_pieces_are_counted(self) -> None:
        """They are labeled as pieces."""
        reply = self.reply(0.0, 1.0, 1.5)
        reply.add(Chunk(text="a"))
        reply.add(Chunk(text="b"))
        assert reply.stats() == "2 pieces, 2.0 per second, first token after 1.00 s"

    def test_a_reply_of_one_token_has_no_speed(self) -> None:
        """An empty reply has none either."""
        reply = self.reply(0.0, 1.0)
        assert reply.stats() == "no reply yet"
        reply.add(Chunk(text="a"))
        assert reply.stats() == "1 piece, first token after 1.00 s"


@given(st.text())
def test_a_terminal_is_sent_no_control_characters(text: str) -> None:
    """A model's text must not move the cursor, set a title or ring; words, lines and tabs stay."""
    shown = strip_control(text)
    assert not any(character in shown for character in "\x1b\x07\x08\r\x7f\x9b\x00")
    assert strip_control("a\tb\nc ü 🐟") == "a\tb\nc ü 🐟"
    assert shown == strip_control(shown)
