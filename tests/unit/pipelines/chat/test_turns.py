"""Messages that stay together when a conversation is shortened."""

from __future__ import annotations

import re

from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from shoal.pipelines.chat.turns import INSTRUCTIONS, drop_turns, fold_instructions, split_turns
from shoal.types import Message, Part, ToolCall

ROLES = st.lists(st.sampled_from(["system", "developer", "user", "assistant", "tool"]), max_size=12)


def messages_of(roles: list[str]) -> list[Message]:
    return [Message(role=role, content=str(place)) for place, role in enumerate(roles)]


def test_a_turn_is_a_user_message_and_all_that_follows() -> None:
    roles = ["system", "user", "assistant", "tool", "assistant", "user", "developer", "assistant", "user"]
    assert split_turns(messages_of(roles)) == [[1, 2, 3, 4], [5, 7], [8]]


def test_an_answer_without_a_question_is_a_turn_of_its_own() -> None:
    assert split_turns(messages_of(["assistant", "user"])) == [[0], [1]]


@given(roles=ROLES)
def test_every_message_but_the_instructions_is_in_one_turn(roles: list[str]) -> None:
    places = [place for turn in split_turns(messages_of(roles)) for place in turn]
    assert places == [place for place, role in enumerate(roles) if role not in ("system", "developer")]


@given(roles=ROLES, count=st.integers(0, 5))
def test_leaving_turns_out_keeps_instructions_and_order(roles: list[str], count: int) -> None:
    messages = messages_of(roles)
    remaining = drop_turns(messages, split_turns(messages)[:count])
    assert [message for message in messages if message in remaining] == remaining
    assert [m for m in remaining if m.role in ("system", "developer")] == [
        m for m in messages if m.role in ("system", "developer")
    ]


@given(rounds=st.lists(st.integers(0, 3), max_size=4), count=st.integers(0, 4))
def test_a_result_never_stands_without_its_call(rounds: list[int], count: int) -> None:
    messages: list[Message] = []
    for calls in rounds:
        messages.append(Message(role="user", content="?"))
        for _ in range(calls):
            call = ToolCall(id=f"c{len(messages)}", name="f")
            messages.append(Message(role="assistant", tool_calls=[call]))
            messages.append(Message(role="tool", content="!", tool_call_id=call.id))
    remaining = drop_turns(messages, split_turns(messages)[:count])
    called = {call.id for message in remaining for call in message.tool_calls}
    assert {message.tool_call_id for message in remaining if message.role == "tool"} == called


def test_instructions_move_into_turns_of_the_user() -> None:
    """Or into a tool's result: templates that check the order of turns leave out calls and results. Those at the
    beginning become one."""
    call = Message(role="assistant", tool_calls=[ToolCall(id="c", name="f")])
    result = Message(role="tool", content="!", tool_call_id="c")
    system, developer, user = (Message(role=role, content=role[0]) for role in ("system", "developer", "user"))
    answer = Message(role="assistant", content="a")
    tagged = {role[0]: f"<system>\n{role[0]}\n</system>" for role in INSTRUCTIONS}
    folded = fold_instructions(
        [
            *(system, developer, user, developer, user, call, system, result, answer, system, developer, user),
            *(call, result, system, answer, developer, answer, developer),
        ]
    )
    assert folded == [
        Message(role="system", content="s\n\nd"),
        Message(role="user", content=f"u\n\n{tagged['d']}\n\nu"),
        call,
        structs.replace(result, content=f"!\n\n{tagged['s']}"),
        answer,
        Message(role="user", content=f"{tagged['s']}\n\n{tagged['d']}\n\nu"),
        call,
        structs.replace(result, content=f"!\n\n{tagged['s']}"),
        answer,
        Message(role="user", content=tagged["d"]),
        answer,
        Message(role="user", content=tagged["d"]),
    ]


def test_parts_beside_an_instruction_are_kept() -> None:
    image = Part(type="image", url="data:x")
    messages = [Message(role="user", content=[image]), Message(role="system", content=[Part(text="a"), Part(text="b")])]
    (only,) = fold_instructions(messages)
    assert only.content == [image, Part(text="<system>\na\nb\n</system>")]


@given(roles=ROLES)
def test_nothing_is_lost_with_moved_instructions(roles: list[str]) -> None:
    folded = fold_instructions(messages_of(roles))
    assert not any(message.role in INSTRUCTIONS for message in folded[1:])
    text = " ".join(str(message.content) for message in folded)
    assert sorted(re.findall(r"\d+", text), key=int) == [str(place) for place in range(len(roles))]
    assert fold_instructions(folded) == folded
