"""Converts JSON schemas to grammars without free whitespace.

The library allows unlimited spaces and newlines in JSON, and a small model may generate only those until its tokens are
spent. There is no setting against it, so this module writes the grammar, with at most one space after a comma or colon.
A keyword that a grammar cannot enforce is rejected by name. A grammar may be narrower than its schema (properties keep
their order); it is wider only where `oneOf` is read as `anyOf`.
"""

from __future__ import annotations

import json
import math
import re
from decimal import Decimal
from typing import Any
from urllib.parse import unquote

from shoal.backends.genai.grammar_spelling import to_literals, write_choice
from shoal.backends.genai.number_ranges import Range, write_integers, write_numbers
from shoal.backends.genai.patterns import RAW_CLASS, Node, bound_length, other_than, parse_pattern, write_node
from shoal.backends.genai.schema_merge import Impossible, Schema, is_same, merge_schemas
from shoal.backends.genai.string_formats import FORMATS, WITHOUT_GRAMMAR
from shoal.errors import InvalidValue

MAX_PARTS = 20_000
"""Maximum subschemas of a schema, counted each time they are merged into another."""

_KIND_KEYS = {
    "string": frozenset({"minLength", "maxLength", "pattern", "format"}),
    "number": frozenset({"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"}),
    "array": frozenset({"items", "prefixItems", "additionalItems", "minItems", "maxItems"}),
    "object": frozenset(
        {"properties", "required", "additionalProperties", "patternProperties", "propertyNames"}
        | {"minProperties", "maxProperties"}
    ),
}
"""Keywords that restrict only values of one type, by type."""

_REFUSED = frozenset(
    {"not", "if", "then", "else", "$dynamicRef", "$recursiveRef", "uniqueItems", "contains", "minContains"}
    | {"maxContains", "unevaluatedItems", "unevaluatedProperties", "dependentRequired", "dependentSchemas"}
    | {"dependencies"}
)
"""Keywords that a grammar cannot enforce."""

_CHOICES = ("anyOf", "oneOf")
KEYS = frozenset({"type", "enum", "const", "$ref", "allOf", *_CHOICES}).union(_REFUSED, *_KIND_KEYS.values())
"""Supported and rejected keywords. All others restrict nothing: annotations, and keywords unknown to JSON Schema."""

_RULES = rf"""
comma ::= "," " "?
colon ::= ":" " "?
string ::= "\"" char* "\""
char ::= {RAW_CLASS} | "\\" (["\\/bfnrt] | "u" ([0-9a-cA-CefEF] [0-9a-fA-F]{{3}} | [dD] [0-7] [0-9a-fA-F]{{2}}))
integer ::= "-"? ("0" | [1-9] [0-9]*)
number ::= integer ("." [0-9]+)? ([eE] [+-]? [0-9]+)?
boolean ::= "true" | "false"
null ::= "null"
value ::= object | array | string | number | boolean | null
object ::= "{{" (member (comma member)*)? "}}"
member ::= string colon value
array ::= "[" (value (comma value)*)? "]"
"""
_PYTHON_TYPES = {"string": str, "array": list, "object": dict, "boolean": bool, "null": type(None)}

_COMPARED = ("minLength", "maxLength", "minimum", "maximum")

_SHARED = {rule.partition(" ")[0]: rule for rule in _RULES.splitlines() if rule}
_WORD = re.compile(r"[a-z]+")
OBJECT = f"root ::= object\n{_RULES}"


def write_grammar(schema: str) -> str:
    """Return the grammar of a schema. Raises InvalidValue with the location and the reason if there is none."""
    try:
        read = json.loads(schema, parse_float=_read_float, parse_constant=_read_float)
    except (ValueError, RecursionError) as error:
        raise InvalidValue(f"the JSON schema is not valid JSON: {error}") from None
    writer = _Writer(read)
    try:
        return writer.write()
    except RecursionError:
        reason = "the schema is nested too deeply or merges recursively: flatten it"
    except InvalidValue as error:
        reason = error.message
    raise InvalidValue(f"unsupported JSON schema at {writer.place}: {reason}") from None


def _find_shared(text: str) -> list[str]:
    """Return those of the shared rules that a grammar uses: one of tools holds a grammar for each of their
    arguments."""
    found: set[str] = set()
    texts = [text]
    while texts:
        names = set(_WORD.findall(texts.pop())) & _SHARED.keys() - found
        found |= names
        texts += [_SHARED[name] for name in names]
    return [rule for name, rule in _SHARED.items() if name in found]


class _Writer:
    def __init__(self, schema: Any) -> None:
        self._schema = schema
        self._rules: dict[str, str] = {}  # names by body
        self._reference_names: dict[str, str] = {}
        self._references: list[str] = []
        self._path: list[str] = []
        self._parts = 0

    @property
    def place(self) -> str:
        """The current location in the schema."""
        return "/".join(["#", *self._path])[:200]

    def write(self) -> str:
        root = self._expression(self._schema)
        rules = [f"{name} ::= {body}" for body, name in self._rules.items()]
        own = "\n".join([f"root ::= {root}", *self._references, *rules])
        return "\n".join([own, *_find_shared(own)])

    def _rule(self, body: str) -> str:
        return self._rules.setdefault(body, f"rule{len(self._rules)}")

    def _below(self, node: Any, *steps: object) -> str:
        """Return the expression of a subschema. After an error, `place` is where it occurred."""
        depth = len(self._path)
        self._path += map(str, steps)
        made = self._expression(node)
        del self._path[depth:]
        return made

    def _count_part(self) -> None:
        self._parts += 1
        if self._parts > MAX_PARTS:
            raise InvalidValue(f"the schema has more than {MAX_PARTS} subschemas after merging: simplify it")

    def _expression(self, node: Any) -> str:
        """Return the expression of a value: a rule name, or alternatives in parentheses."""
        self._count_part()
        if node is True:
            return "value"
        if node is False:
            raise Impossible("`false` allows no value: remove it, or do not require it")
        if not isinstance(node, dict):
            raise InvalidValue("a schema must be an object, true or false")
        keys = node.keys() & KEYS
        if refused := sorted(key for key in keys & _REFUSED if (key, node[key]) != ("uniqueItems", False)):
            raise InvalidValue(f"`{refused[0]}` is not supported: remove it")
        if keys == {"$ref"}:
            return self._reference(node["$ref"])
        if keys == {"allOf"} and isinstance(node["allOf"], list) and len(node["allOf"]) == 1:
            return self._below(node["allOf"][0], "allOf", 0)
        if keys & {"$ref", "allOf"}:
            return self._expression(self._merged(node, ()))
        for key in _CHOICES:
            if key in keys:
                return self._choice(node, key, {other: node[other] for other in keys - {key}})
        if keys & {"enum", "const"}:
            return self._constants(node)
        return self._alternatives([self._kind(kind, node) for kind in _kinds(node)])

    def _kind(self, kind: Any, node: Schema) -> str:
        match kind:
            case "null" | "boolean":
                return str(kind)
            case "integer" | "number":
                return self._number(kind, node)
            case "string":
                return self._string(node)
            case "array":
                return self._array(node)
            case "object":
                return self._object(node)
            case "value":
                return "value"
        raise InvalidValue(f"`type` must be string, number, integer, boolean, null, array or object (got {kind!r})")

    def _alternatives(self, choices: list[str]) -> str:
        return self._rule(" | ".join(choices)) if len(choices) > 1 else choices[0]

    def _choice(self, node: Schema, key: str, beside: Schema) -> str:
        if not isinstance(node[key], list) or not node[key]:
            raise InvalidValue(f"`{key}` must be a list of at least one schema")
        made, depth = [], len(self._path)
        for at, each in enumerate(node[key]):
            try:
                made.append(self._below({"allOf": [beside, each]} if beside else each, key, at))
            except Impossible:
                del self._path[depth:]
        if not made:
            raise Impossible(f"no value satisfies any schema in `{key}`")
        return self._alternatives(made)

    def _merged(self, node: Any, seen: tuple[str, ...]) -> Schema:
        """Return the schema with `allOf` and `$ref` at its top level resolved."""
        self._count_part()
        if node is True:
            return {}
        if node is False:
            raise Impossible("`false` allows no value: remove it, or do not require it")
        if not isinstance(node, dict) or not isinstance(node.get("allOf", []), list):
            raise InvalidValue("`allOf` must be a list of schemas")
        made: Schema = {}
        if "$ref" in node:
            if node["$ref"] in seen:
                raise InvalidValue(f"`$ref` {node['$ref']!r} is circular: inline the schema that it stands for")
            made = self._merged(self._target(node["$ref"]), (*seen, node["$ref"]))
        for each in node.get("allOf", []):
            made = merge_schemas(made, self._merged(each, seen))
        return merge_schemas(made, {key: node[key] for key in node.keys() & KEYS - {"$ref", "allOf"}})

    def _target(self, pointer: Any) -> Any:
        if not isinstance(pointer, str) or not pointer.startswith("#"):
            raise InvalidValue(f"`$ref` {pointer!r} is outside the schema: move its target to `$defs`")
        node = self._schema
        for part in unquote(pointer[1:]).split("/")[1:] if pointer != "#" else ():
            step = part.replace("~1", "/").replace("~0", "~")
            try:
                node = node[int(step)] if isinstance(node, list) else node[step]
            except (LookupError, ValueError, TypeError):
                raise InvalidValue(f"`$ref` {pointer!r} has no target in the schema") from None
        return node

    def _reference(self, pointer: Any) -> str:
        """Return the rule of a reference's target; the target may contain the reference."""
        node = self._target(pointer)
        if pointer not in self._reference_names:
            name = self._reference_names[pointer] = f"ref{len(self._reference_names)}"
            self._references.append(f"{name} ::= {self._below(node, f'$ref {pointer}')}")
        return self._reference_names[pointer]

    def _constants(self, node: Schema) -> str:
        values = node.get("enum", [node.get("const")])
        if not isinstance(values, list):
            raise InvalidValue("`enum` must be a list of values")
        if "const" in node:
            values = [each for each in values if is_same(each, node["const"])]
        found = [_spell(each) for each in values if _fulfills(each, node)]
        if not found:
            raise Impossible("no value of `enum` or `const` satisfies the other keywords")
        return self._rule(write_choice(found))

    def _number(self, kind: str, node: Schema) -> str:
        if not node.keys() & _KIND_KEYS["number"]:
            return kind
        bounds = _read_range(node)
        return self._rule(write_integers(bounds) if kind == "integer" else write_numbers(bounds))

    def _string(self, node: Schema) -> str:
        minimum, maximum = _counts(node, "Length")
        tree = _read_pattern(node)
        if tree is not None:
            return self._quoted(bound_length(tree, minimum, maximum))
        if not minimum and maximum is None:
            return "string"
        return self._rule(f'"\\"" char{_repeat(minimum, maximum)} "\\""')

    def _quoted(self, tree: Node) -> str:
        return self._rule(f'"\\"" {write_node(tree, self._rule)} "\\""')

    def _array(self, node: Schema) -> str:
        minimum, maximum = _counts(node, "Items")
        items = node.get("items", True)
        prefix, key, open_end = node.get("prefixItems", []), "items", "items" in node and items is not False
        if isinstance(items, list):  # the form before `prefixItems` existed
            prefix, key, items = items, "additionalItems", node.get("additionalItems", True)
            open_end = "additionalItems" in node and items is not False
        if not isinstance(prefix, list):
            raise InvalidValue("`prefixItems` must be a list of schemas")
        firsts = [self._below(each, "prefixItems", at) for at, each in enumerate(prefix[:maximum])]
        if firsts and not open_end:
            maximum = max(minimum, len(firsts)) if maximum is None else maximum
        if maximum is None or maximum > len(firsts):
            try:
                item = self._below(items, key)
            except Impossible:
                if minimum > len(firsts):
                    raise
                del self._path[-1:]
                item, maximum = "", len(firsts)
        if maximum == 0:
            return self._rule('"[" "]"')
        if not firsts:
            firsts.append(item)
        rest = ""
        if maximum is None or maximum > len(firsts):
            max_others = None if maximum is None else maximum - len(firsts)
            rest = f"(comma {item}){_repeat(max(minimum - len(firsts), 0), max_others)}"
        for at in reversed(range(1, len(firsts))):
            rest = self._rule(f"comma {firsts[at]} {rest}") + ("" if at < minimum else "?")
        return self._rule(f'"[" {firsts[0]} {rest} "]"' if minimum else f'"[" ({firsts[0]} {rest})? "]"')

    def _object(self, node: Schema) -> str:
        """Return an object with the members in the order of `properties`, then additional ones if requested."""
        properties, required = node.get("properties", {}), node.get("required", [])
        more = node.get("additionalProperties")
        if not isinstance(properties, dict) or not isinstance(required, list) or not all(map(_is_text, required)):
            raise InvalidValue("`properties` must map names to schemas, and `required` must be a list of names")
        properties = properties | {name: True if more is None else more for name in required if name not in properties}
        minimum, maximum = _counts(node, "Properties")
        if maximum == 0 and not required:
            return self._rule('"{" "}"')
        if not properties:
            return self._map(node, more, minimum, maximum)
        for key in ("patternProperties", "propertyNames"):
            if node.get(key) not in (None, True, {}):
                raise InvalidValue(f"`{key}` cannot be combined with `properties`: list every property, or none")
        members, skipped = [], len(self._path)
        for name, each in properties.items():
            try:
                value = self._below(each, "properties", name)
            except Impossible:
                if name in required:
                    raise
                del self._path[skipped:]
                continue
            members.append((f"{to_literals(_spell(name))} colon {value}", name in required))
        others = ""
        if more not in (None, False):
            names = self._quoted(other_than(frozenset(properties)))
            others = self._rule(f"{names} colon {self._below(more, 'additionalProperties')}")
        if minimum > len(set(required)) or (maximum is not None and (others or maximum < len(members))):
            raise InvalidValue(
                "`minProperties` and `maxProperties` cannot be combined with `properties`: use `required`, and set "
                "`additionalProperties` to false"
            )
        return self._rule(f'"{{" {self._members(members, others)} "}}"')

    def _map(self, node: Schema, more: Any, minimum: int, maximum: int | None) -> str:
        """Return an object without named properties."""
        name, value, patterns = "string", True if more is None else more, node.get("patternProperties") or {}
        if patterns:
            if not isinstance(patterns, dict) or len(patterns) > 1 or more not in (None, False):
                raise InvalidValue(
                    "`patternProperties` must have only one pattern, and no `additionalProperties` beside it"
                )
            ((pattern, value),) = patterns.items()
            name = self._quoted(parse_pattern(pattern))
        if (named := node.get("propertyNames", True)) is not True:
            if patterns:
                raise InvalidValue("`propertyNames` cannot be combined with `patternProperties`: remove one of them")
            name = self._below({"allOf": [{"type": "string"}, named]}, "propertyNames")
        if minimum > 1:
            raise InvalidValue("`minProperties` above 1 is not supported, as names may repeat: use `required`")
        if value is False and not minimum:
            return self._rule('"{" "}"')
        if (name, value, minimum, maximum) == ("string", True, 0, None):
            return "object"
        member = self._rule(f"{name} colon {self._below(value, 'additionalProperties')}")
        whole = f"{member} (comma {member}){_repeat(0, None if maximum is None else maximum - 1)}"
        return self._rule(f'"{{" {whole} "}}"' if minimum else f'"{{" ({whole})? "}}"')

    def _members(self, members: list[tuple[str, bool]], others: str) -> str:
        """Return the members, with a comma before each one present except the first."""
        # Expressions of the remaining members: after at least one member, and after none.
        after, first = (f"(comma {others})*", f"({others} (comma {others})*)?") if others else ('""', '""')
        for member, needed in reversed(members):
            rest, name = after, self._rule(member)
            after = self._rule(f"comma {name} {rest}" if needed else f"(comma {name})? {rest}")
            first = self._rule(f"{name} {rest}" if needed else f"{name} {rest} | {first}")
        return first


def _read_float(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text} is out of range for a number")
    return value


def _kinds(node: Schema) -> list[Any]:
    """Return the types of a value. If the schema names none, those that its keywords apply to."""
    named = node.get("type", [kind for kind, keys in _KIND_KEYS.items() if node.keys() & keys] or "value")
    return named if isinstance(named, list) and named else [named]


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _spell(value: Any) -> str:
    """Return the JSON of a constant. A lone surrogate is escaped, since UTF-8 text cannot contain one."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    return text if text.isascii() or text.encode(errors="replace").decode() == text else json.dumps(value)


def _fulfills(value: Any, node: Schema) -> bool:
    """Whether a constant satisfies the other keywords. Raises InvalidValue if that cannot be decided."""
    kind = next((name for name, made in _PYTHON_TYPES.items() if isinstance(value, made)), "number")
    if "type" in node and not any(
        each == kind or (kind == "number" and each == "integer" and value == int(value)) for each in _kinds(node)
    ):
        return False
    for key in _KIND_KEYS.get(kind, frozenset()) & node.keys() - {"format"}:
        limit = _decimal(node, key) if key in _COMPARED else None
        match key:
            case "minLength" | "minimum":
                fits = limit is None or (len(value) if key == "minLength" else value) >= limit
            case "maxLength" | "maximum":
                fits = limit is None or (len(value) if key == "maxLength" else value) <= limit
            case _:
                raise InvalidValue(
                    f"`{key}` cannot be combined with `enum` or `const`: list only values that satisfy it"
                )
        if not fits:
            return False
    return True


def _read_pattern(node: Schema) -> Node | None:
    """Return the tree of the pattern, else of the format: beside a pattern, a format is only an annotation."""
    pattern, name = node.get("pattern"), node.get("format")
    if pattern is not None:
        if not isinstance(pattern, str):
            raise InvalidValue("`pattern` must be a string")
        return parse_pattern(pattern)
    if not isinstance(name, str):
        return None
    if name in WITHOUT_GRAMMAR:
        raise InvalidValue(f"`format` {name!r} is not supported: remove it, or use a `pattern`")
    return parse_pattern(FORMATS[name]) if name in FORMATS else None


def _read_range(node: Schema) -> Range:
    lower, upper = _decimal(node, "minimum"), _decimal(node, "maximum")
    open_lower, open_upper = node.get("exclusiveMinimum") is True, node.get("exclusiveMaximum") is True  # draft 4
    above = None if isinstance(node.get("exclusiveMinimum"), bool) else _decimal(node, "exclusiveMinimum")
    below = None if isinstance(node.get("exclusiveMaximum"), bool) else _decimal(node, "exclusiveMaximum")
    if above is not None and (lower is None or above >= lower):
        lower, open_lower = above, True
    if below is not None and (upper is None or below <= upper):
        upper, open_upper = below, True
    step = _decimal(node, "multipleOf")
    if step is not None and step <= 0:
        raise InvalidValue(f"`multipleOf` must be greater than 0 (got {step})")
    return Range(lower, upper, open_lower, open_upper, step)


def _decimal(node: Schema, key: str) -> Decimal | None:
    value = node.get(key)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise InvalidValue(f"`{key}` must be a number (got {value!r})")
    return Decimal(repr(value))


def _counts(node: Schema, what: str) -> tuple[int, int | None]:
    """Return `min...` and `max...` of characters, items or properties."""
    made: list[int | None] = []
    for key in (f"min{what}", f"max{what}"):
        value = node.get(key)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int | float) or value < 0):
            raise InvalidValue(f"`{key}` must be a number of at least 0 (got {value!r})")
        if value is not None and value % 1:
            raise InvalidValue(f"`{key}` must be a whole number (got {value})")
        made.append(None if value is None else int(value))
    minimum, maximum = made[0] or 0, made[1]
    if maximum is not None and maximum < minimum:
        raise InvalidValue(f"`min{what}` {minimum} is greater than `max{what}` {maximum}: change one of them")
    return minimum, maximum


def _repeat(minimum: int, maximum: int | None) -> str:
    if maximum is None:
        return f"{{{minimum},}}" if minimum else "*"
    return f"{{{minimum},{maximum}}}"
