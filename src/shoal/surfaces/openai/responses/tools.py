"""Convert the tools of a request to functions. Raises RequestErrors that name the field."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from shoal.errors import InvalidValue, Unsupported, WrongType
from shoal.http.json.extras import check_depth, to_json_bytes
from shoal.surfaces.openai.conversation import ToolSelection, to_tool, to_tool_selection
from shoal.surfaces.openai.responses import wire
from shoal.surfaces.openai.responses.custom_input import FIELD
from shoal.surfaces.openai.responses.tool_names import Kind, ToolName, ToolNames
from shoal.surfaces.openai.wire_chat import FunctionDefinition
from shoal.surfaces.shared.wire_conversations import MAX_TOOLS
from shoal.types import Tool

_KINDS: dict[str, Kind] = {"function": "function", "custom": "custom", "tool_search": "tool_search"}
_TYPE = re.compile(r"[a-z0-9_]{1,64}")
_FORMAT = msgspec.json.Decoder(wire.CustomFormat)


@dataclass(slots=True)
class Tools:
    """The functions that a model may call, with their names, and what was left out, for the header x-shoal-ignored."""

    functions: list[Tool] = field(default_factory=list)
    names: ToolNames = field(default_factory=ToolNames)
    ignored: list[str] = field(default_factory=list)

    def add(self, tools: Sequence[wire.ResponseTool], where: str = "tools") -> list[str]:
        """Add tools, and return their flat names. Tools that a server runs itself are left out: no server here does."""
        return [name for at, tool in enumerate(tools) for name in self._add(tool, f"{where}[{at}]")]

    def _add(self, tool: wire.ResponseTool, where: str, space: wire.ResponseTool | None = None) -> Iterator[str]:
        if tool.type == "namespace" and space is None:
            if not tool.name:
                raise WrongType(f"Missing required field '{where}.name'.", param="tools")
            for at, each in enumerate(tool.tools or ()):
                yield from self._add(each, f"{where}.tools[{at}]", tool)
            return
        kind = _find_kind(tool)
        if kind is None:
            self.ignore("tools", tool.type)
            return
        name = tool.name or ("tool_search" if kind == "tool_search" else "")
        if not name:
            raise WrongType(f"Missing required field '{where}.name'.", param="tools")
        flat = self.names.flatten(ToolName(kind, name, (space and space.name) or ""))
        yield flat
        if any(each.name == flat for each in self.functions):
            return  # clients repeat tools that a search has found
        if len(self.functions) == MAX_TOOLS:
            raise InvalidValue(f"'tools' has more than {MAX_TOOLS} functions; send fewer.", param="tools")
        self.functions.append(_to_function(tool, kind, flat, space))

    def ignore(self, name: str, kind: str) -> None:
        """Note that something of this type was left out of the field `name`."""
        note = f"{name}.{kind}" if _TYPE.fullmatch(kind) else name
        if note not in self.ignored:
            self.ignored.append(note)

    def select(self, choice: str | wire.ResponseToolChoice | None) -> ToolSelection:
        """Convert `tool_choice`; `allowed_tools` leaves only those."""
        if not isinstance(choice, wire.ResponseToolChoice):
            return to_tool_selection(choice, self.functions, "tool_choice")
        if choice.type == "allowed_tools":
            allowed = set(self._flat_names(choice.tools or ()))
            self.functions = [each for each in self.functions if each.name in allowed]
            return to_tool_selection(choice.mode or "auto", self.functions, "tool_choice")
        flat = next(self._flat_names([choice]), None)
        if flat is None:
            raise Unsupported(
                f"'tool_choice' is of type {choice.type[:64]!r}; name a function, since no other tool runs here.",
                param="tool_choice",
            )
        if flat not in {each.name for each in self.functions}:
            named = (choice.name or choice.type)[:64]
            raise InvalidValue(f"'tool_choice' names {named!r}, which is not in 'tools'.", param="tool_choice")
        return ToolSelection("function", flat)

    def _flat_names(self, choices: Sequence[wire.ResponseToolChoice]) -> Iterator[str]:
        for each in choices:
            kind = _KINDS.get(each.type)
            if kind is not None:
                yield self.names.flatten(ToolName(kind, each.name or each.type, each.namespace or ""))


def _find_kind(tool: wire.ResponseTool) -> Kind | None:
    """Return the kind of a tool that the client runs, None for those that a server does."""
    if tool.type == "tool_search" and tool.execution != "client":
        return None
    return _KINDS.get(tool.type)


def _to_function(tool: wire.ResponseTool, kind: Kind, flat: str, space: wire.ResponseTool | None) -> Tool:
    if kind == "custom":
        return _to_custom(tool, flat)
    description = tool.description
    if space is not None and space.description and not description:
        description = space.description
    return to_tool(
        FunctionDefinition(name=flat, description=description, parameters=tool.parameters, strict=tool.strict), "tools"
    )


def _to_custom(tool: wire.ResponseTool, flat: str) -> Tool:
    """Convert a custom tool to a function of one text. A regular expression constrains the text where the engine
    follows schemas; a grammar is part of the description."""
    raw = to_json_bytes(tool.format)
    form = wire.CustomFormat()
    if raw is not None:
        try:
            form = _FORMAT.decode(raw)
        except (msgspec.DecodeError, RecursionError) as error:
            raise WrongType(f"'tools': the format of {flat[:64]!r}: {error}", param="tools") from None
    text: dict[str, Any] = {"type": "string"}
    notes = [tool.description or "", f"The whole input is the text of the argument `{FIELD}`."]
    if form.type == "grammar" and form.definition:
        notes.append(f"It follows this grammar ({form.syntax or 'lark'}):\n{form.definition}")
        if form.syntax == "regex":
            text["pattern"] = f"^(?:{form.definition})$"
    parameters = {"type": "object", "properties": {FIELD: text}, "required": [FIELD], "additionalProperties": False}
    check_depth(parameters, "tools")
    return Tool(name=flat, description="\n".join(filter(None, notes)), parameters=parameters)
