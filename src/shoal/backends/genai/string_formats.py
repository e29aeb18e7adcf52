"""String formats of JSON schemas as regular expressions.

Each matches a usual subset of its format: years from 1000 to 2999, addresses in ASCII.
"""

from __future__ import annotations

_DATE = (
    r"(?:[12]\d{3}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12]\d|3[01])|(?:0[469]|11)-(?:0[1-9]|[12]\d|30)"
    r"|02-(?:0[1-9]|1\d|2[0-8]))|(?:[12]\d(?:0[48]|[2468][048]|[13579][26])|(?:1[26]|2[048])00)-02-29)"
)
_TIME = r"(?:[01]\d|2[0-3]):[0-5]\d:[0-5]\d(?:\.\d{1,9})?(?:Z|[+-](?:[01]\d|2[0-3]):[0-5]\d)"
_DAYS = r"(?:\d{1,9}Y(?:\d{1,9}M(?:\d{1,9}D)?)?|\d{1,9}M(?:\d{1,9}D)?|\d{1,9}D)"
_HOURS = r"T(?:\d{1,9}H(?:\d{1,9}M(?:\d{1,9}S)?)?|\d{1,9}M(?:\d{1,9}S)?|\d{1,9}S)"

_LABEL = r"[A-Za-z0-9](?:[A-Za-z0-9-]{0,60}[A-Za-z0-9])?"
_WORD = r"[A-Za-z0-9_+-]"
_EMAIL = (
    rf"{_WORD}{{1,16}}(?:\.{_WORD}{{1,15}}){{0,3}}"
    r"@(?:[A-Za-z0-9](?:[A-Za-z0-9-]{0,28}[A-Za-z0-9])?\.){1,4}[A-Za-z]{2,16}"
)

_OCTET = r"(?:25[0-5]|2[0-4]\d|1\d\d|[1-9]?\d)"
_GROUP = "[0-9a-fA-F]{1,4}"
_IPV6 = "|".join(
    [
        f"(?:{_GROUP}:){{7}}{_GROUP}",
        *(f"(?:{_GROUP}:){{1,{7 - after}}}(?::{_GROUP}){{1,{after}}}" for after in range(1, 7)),
        f"(?:{_GROUP}:){{1,7}}:",
        f":(?::{_GROUP}){{1,7}}",
        "::",
    ]
)

_PATH = r"(?:[A-Za-z0-9._~!$&'()*+,;=:@-]|%[0-9A-Fa-f]{2})"
_QUERY = rf"(?:\?(?:{_PATH}|[/?])*)?(?:#(?:{_PATH}|[/?])*)?"
_URI = (
    rf"[A-Za-z][A-Za-z0-9+.-]{{0,19}}:(?://[A-Za-z0-9._~-]*(?::\d{{1,5}})?(?:/(?:{_PATH}|/)*)?|{_PATH}(?:{_PATH}|/)*)"
    rf"{_QUERY}"
)
_REFERENCE = rf"(?:{_URI}|(?:[A-Za-z0-9._~-]+)?(?:/{_PATH}+)*/?{_QUERY})"
_POINTER = r"(?:/(?:[^/~]|~[01])*)*"

FORMATS = {
    name: f"^(?:{expression})$"
    for name, expression in {
        "date": _DATE,
        "time": _TIME,
        "date-time": f"{_DATE}T{_TIME}",
        "duration": rf"P(?:{_DAYS}(?:{_HOURS})?|{_HOURS}|\d{{1,9}}W)",
        "email": _EMAIL,
        "idn-email": _EMAIL,
        "hostname": rf"{_LABEL}(?:\.{_LABEL}){{0,3}}",
        "idn-hostname": rf"{_LABEL}(?:\.{_LABEL}){{0,3}}",
        "ipv4": rf"(?:{_OCTET}\.){{3}}{_OCTET}",
        "ipv6": _IPV6,
        "uuid": "[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}",
        "uri": _URI,
        "iri": _URI,
        "uri-reference": _REFERENCE,
        "iri-reference": _REFERENCE,
        "json-pointer": _POINTER,
        "relative-json-pointer": rf"(?:0|[1-9]\d{{0,9}})(?:#|{_POINTER})",
    }.items()
}
"""Expressions by format name of JSON Schema. Other names are custom and restrict nothing."""

WITHOUT_GRAMMAR = frozenset({"regex", "uri-template"})
"""Formats of JSON Schema without an expression here."""
