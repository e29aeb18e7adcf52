"""Choose the prompt for a task by the rules of sentence-transformers' encode, encode_query and encode_document."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from shoal.errors import InvalidValue
from shoal.types import Embed

ROLES: dict[str, tuple[str, ...]] = {
    "query": ("query", "retrieval.query"),
    "document": ("document", "passage", "corpus", "retrieval.passage"),
}
"""Prompt names that models use for each role, in order of preference."""


class HasPrompts(Protocol):
    """A model's prompts by name, and the name of its default prompt."""

    @property
    def prompts(self) -> Mapping[str, str]: ...

    @property
    def default_prompt_name(self) -> str | None: ...


class HasTasks(HasPrompts, Protocol):
    """The purposes that a model has an adapter for, and the default one."""

    @property
    def embedding_tasks(self) -> tuple[str, ...]: ...

    @property
    def default_embedding_task(self) -> str | None: ...


def resolve_adapter(spec: HasTasks, prompt_name: str | None, input_type: str | None) -> int:
    """Return the number of the adapter for a request with this prompt or role, 0 for none: that of the task of this
    name, or without both of the default prompt's name; else that of the model's default task."""
    if prompt_name is None and input_type is None:
        prompt_name = spec.default_prompt_name
    names = ROLES[input_type] if prompt_name is None and input_type is not None else (prompt_name,)
    task = next((name for name in names if name in spec.embedding_tasks), spec.default_embedding_task)
    return 0 if task is None else spec.embedding_tasks.index(task) + 1


def resolve_prompt(spec: HasPrompts, prompt_name: str | None, input_type: str | None) -> str:
    """Return the text to put before each input, possibly empty.

    A name wins over a role. A role without a prompt adds nothing, not even the default prompt. Raises InvalidValue for
    a name that the model does not have and for an unknown role.
    """
    check_role(input_type)
    if prompt_name is not None:
        return get_prompt(spec, prompt_name)
    if input_type is not None:
        name = find_role_prompt(spec, input_type)
        return "" if name is None else spec.prompts[name]
    return spec.prompts.get(spec.default_prompt_name, "") if spec.default_prompt_name else ""


def find_role_prompt(spec: HasPrompts, input_type: str) -> str | None:
    """Return the name of the model's prompt for a role, or None."""
    return next((name for name in ROLES[input_type] if name in spec.prompts), None)


def find_prompt_field(task: Embed, prompt: str) -> str | None:
    """Return the field that requested a prompt, or None without one. An empty prompt may name a task, and changes no
    text."""
    if not prompt:
        return None
    if task.prompt_name is not None:
        return "prompt_name"
    return "input_type" if task.input_type is not None else None


def check_role(input_type: str | None) -> None:
    """Raises InvalidValue for an unknown role."""
    if input_type is not None and input_type not in ROLES:
        raise InvalidValue(f"unknown input_type {input_type!r}; use one of: {', '.join(ROLES)}", param="input_type")


def get_prompt(spec: HasPrompts, name: str) -> str:
    """Return the prompt of that name. Raises an InvalidValue that lists the model's prompts."""
    prompt = spec.prompts.get(name)
    if prompt is None:
        if not spec.prompts:
            what = f"the model has no prompts, so there is no prompt named {name!r}"
            raise InvalidValue(f"{what}: omit it, and prepend the prompt to the text yourself", param="prompt_name")
        known = ", ".join(sorted(spec.prompts))
        raise InvalidValue(f"the model has no prompt named {name!r}; it has: {known}", param="prompt_name")
    return prompt
