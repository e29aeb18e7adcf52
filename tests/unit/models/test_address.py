"""The grammar of addresses and names."""

from __future__ import annotations

import string

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.backends import parse_address, parse_served
from shoal.errors import AddressError
from shoal.models.address import Address, ServedModel, check_name
from shoal.names import RESERVED

_WORD = string.ascii_letters + string.digits
parts = st.builds(
    str.__add__,
    st.sampled_from(_WORD + "_-"),
    st.text(_WORD + "._-", max_size=95),
)
names = st.one_of(parts, st.builds("{}/{}".format, parts, parts)).filter(lambda name: name not in RESERVED)
revisions = st.one_of(st.just(""), parts, st.builds("refs/{}/{}".format, parts, parts)).filter(lambda r: len(r) <= 96)
packages = st.from_regex(r"[a-z0-9](-?[a-z0-9]){0,40}", fullmatch=True)
hosts = st.one_of(
    st.from_regex(r"[a-z0-9]([a-z0-9-]{0,20}[a-z0-9])?(\.[a-z0-9]{1,10}){0,2}", fullmatch=True),
    st.ip_addresses(v=4).map(str),
    st.ip_addresses(v=6).map(lambda ip: f"[{ip}]"),
)
authorities = st.builds(
    lambda host, port: f"{host}:{port}" if port else host, hosts, st.one_of(st.none(), st.integers(1, 65535))
)
paths = st.lists(parts, max_size=3).map(lambda folders: "".join(f"/{folder}" for folder in folders))
files = st.text(
    st.characters(exclude_categories=("Cs", "Cc"), exclude_characters=",\x7f"), min_size=1, max_size=60
).map(lambda text: parse_address(f"file:{text}"))

addresses = st.one_of(
    st.builds(Address, scheme=st.just("hf"), target=names, revision=revisions),
    st.builds(Address, scheme=st.just("pypi"), target=packages, revision=st.sampled_from(["", "0.1.0", "1!2.0+cpu"])),
    files,
    st.one_of(
        st.builds(
            Address,
            scheme=st.sampled_from(["triton", "tritons"]),
            target=authorities,
            model=parts,
            revision=st.sampled_from(["", "1", "17"]),
        ),
        st.builds(Address, scheme=st.sampled_from(["triton", "tritons"]), target=authorities),
    ),
    st.builds(
        Address,
        scheme=st.sampled_from(["tei+http", "tei+https", "openai+http", "openai+https"]),
        target=st.builds(str.__add__, authorities, paths),
        model=st.one_of(st.just(""), names.filter(lambda name: name[0] != "-" and "/." not in name)),
    ),
    st.builds(
        Address,
        scheme=st.sampled_from(["tei+grpc", "tei+grpcs"]),
        target=authorities,
        model=st.one_of(st.just(""), names.filter(lambda name: name[0] != "-" and "/." not in name)),
    ),
    st.builds(
        Address,
        scheme=st.just("fake"),
        model=st.one_of(st.just(""), names),
        options=st.sampled_from([(), (("delay_ms", "5"),), (("delay_ms", "0.5"), ("slots", "2"))]),
    ),
)


@given(addresses)
def test_rendered_address_parses_back(address: Address) -> None:
    """Rendering and parsing are inverse."""
    assert parse_address(str(address)) == address


@given(names, st.lists(addresses.filter(lambda one: one.id != "" or one.local), min_size=1, max_size=3))
def test_rendered_served_parses_back(name: str, several: list[Address]) -> None:
    """Also for a name with replicas."""
    served = ServedModel(name=name, addresses=tuple(several))
    assert parse_served(str(served)) == served


@given(st.text(max_size=40))
def test_any_text_parses_or_is_refused(text: str) -> None:
    """No other error is raised, and accepted addresses are canonical."""
    try:
        served = parse_served(text)
    except AddressError:
        return
    assert parse_served(str(served)) == served


@given(names)
def test_good_names_pass(name: str) -> None:
    """Valid names stay unchanged."""
    assert check_name(name) == name


@pytest.mark.parametrize(
    "name",
    [
        "", "..", ".", ".hidden", "a/..", "a/.b", "../a", "/a", "a/", "a//b", "a/b/c", "a\0b", "a b", "a%2eb", "%2e%2e",
        "a\\b", "caf\u00e9", "\u0430bc", "a\u2215b", "\uff41", "a\n", "a:b", "a@b", "a+b", "a" * 97, "b/" + "a" * 97,
        "sse", "load", "unload",
    ],
)  # fmt: skip
def test_hostile_names_are_refused(name: str) -> None:
    """Traversal, lookalikes, control characters, overlong parts and reserved words are invalid."""
    with pytest.raises(AddressError):
        check_name(name)
    with pytest.raises(AddressError):
        parse_served(f"{name}=file:/models/tiny")


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("org/name", Address(scheme="hf", target="org/name")),
        ("bert-base", Address(scheme="hf", target="bert-base")),
        ("org/name:q8_0", Address(scheme="hf", target="org/name", form="Q8_0")),
        ("hf.co/org/name:UD-Q4_K_XL", Address(scheme="hf", target="org/name", form="UD-Q4_K_XL")),
        ("huggingface.co/org/name:latest", Address(scheme="hf", target="org/name")),
        ("hf:org/name:BF16@main", Address(scheme="hf", target="org/name", form="BF16", revision="main")),
        ("hf:org/name@refs/pr/1", Address(scheme="hf", target="org/name", revision="refs/pr/1")),
        ("pypi:GT_All.mini==0.1.0", Address(scheme="pypi", target="gt-all-mini", revision="0.1.0")),
        ("file:/a//b/", Address(scheme="file", target="/a/b")),
        ("file:/a=b c", Address(scheme="file", target="/a=b c")),
        ("triton://Host:8001#m@2", Address(scheme="triton", target="host:8001", model="m", revision="2")),
        ("tritons://[::1]:8001", Address(scheme="tritons", target="[::1]:8001")),
        (
            "triton:///run/8001/grpc:8001#m@2",
            Address(scheme="triton", target="/run/8001/grpc:8001", model="m", revision="2"),
        ),
        ("triton:///a/My.Home", Address(scheme="triton", target="/a/My.Home")),
        ("tei+http://h:8080/", Address(scheme="tei+http", target="h:8080")),
        ("tei+grpc://H:8080#org/m", Address(scheme="tei+grpc", target="h:8080", model="org/m")),
        ("tei+grpcs://h", Address(scheme="tei+grpcs", target="h")),
        ("openai+https://h/v1#org/m:8b", Address(scheme="openai+https", target="h/v1", model="org/m:8b")),
        ("fake", Address(scheme="fake")),
        ("fake:delay_ms=5", Address(scheme="fake", options=(("delay_ms", "5"),))),
        ("fake#demo", Address(scheme="fake", model="demo")),
    ],
)
def test_addresses_of_every_scheme(text: str, address: Address) -> None:
    """Each scheme's forms follow the grammar, in canonical spelling."""
    assert parse_address(text) == address


@pytest.mark.parametrize(
    ("text", "advice"),
    [
        ("", "hf:org/name"),
        ("/models/tiny", "file:/models/tiny"),
        ("./tiny", "file:./tiny"),
        ("http://host/v1", "did you mean"),
        ("pipy:name", "did you mean pypi:"),
        ("s3:bucket", "known schemes"),
        ("a/b/c", "org/name"),
        ("org/name@", "revision"),
        ("org/name@a..b/../c", "revision"),
        ("hf:../../etc", "org/name"),
        ("hf:org/n\u0430me", "org/name"),
        ("pypi:--index-url=x", "pypi:package"),
        ("pypi:a==", "pypi:package"),
        ("file:", "path"),
        ("file:/a\0b", "control"),
        ("triton:host", "triton://host:port"),
        ("triton://host:8001/path", "no path"),
        ("tritons:///run/grpc", "no path"),
        ("triton:///", "no path"),
        ("triton:///a//b", "no path"),
        ("triton:///a b", "no path"),
        ("triton://host:8001#", "name a model"),
        ("tei+grpc://host:8080/embed", "write tei+grpc://host:port"),
        ("tei+grpc://host:8080/", "gRPC has no path"),
        ("grpc://host", "did you mean tei+grpc:"),
        ("triton://host:8001#m@latest", "whole number"),
        ("triton://host:99999", "host:port"),
        ("triton://-x", "host:port"),
        ("triton://[zz::1]:1", "host:port"),
        ("triton://[1:2]:1", "host:port"),
        ("openai+http://user:key@host/v1#m", "configuration"),
        ("openai+http://host/v1?x=1#m", "'?'"),
        ("openai+http://host/%2e%2e#m", "'%'"),
        ("openai+http://host/../v1#m", "path"),
        ("openai+http://host/v1#../m", "#MODEL"),
        ("fake:delay", "key=value"),
    ],
)
def test_refusals_show_the_correct_form(text: str, advice: str) -> None:
    """The message has the correct form."""
    with pytest.raises(AddressError) as caught:
        parse_address(text)
    assert advice in caught.value.message


def test_a_key_in_an_address_is_not_repeated() -> None:
    """The message, which may be logged, does not show a secret in the address."""
    with pytest.raises(AddressError) as caught:
        parse_address("openai+http://user:hunter2@host/v1")
    assert "hunter2" not in caught.value.message


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("org/name@v1", "org/name"),
        ("pypi:tiny-model==1.0", "tiny-model"),
        ("file:/models/tiny", "tiny"),
        ("triton://h:1#m@2", "m"),
        ("triton://h:1,triton://h:2", ""),
        ("fake:delay_ms=5", "fake"),
        ("mine=org/name", "mine"),
        ("team/mine=file:/a=b,fake:delay_ms=5", "team/mine"),
    ],
)
def test_a_model_is_called_by_its_source_unless_named(text: str, name: str) -> None:
    """The id of the first address is the name; NAME= in front replaces it."""
    assert parse_served(text).name == name


@pytest.mark.parametrize(
    ("text", "advice"),
    [
        ("file:.", "NAME=file:."),
        ("file:/models/my model", "NAME=file:/models/my model"),
        ("openai+http://h/v1#llama:8b", "NAME="),
        ("org/a,org/b", "NAME=org/a,org/b"),
        ("x=triton://h:1", "#MODEL"),
        ("x=", "hf:org/name"),
        ("org/a,", "hf:org/name"),
    ],
)
def test_addresses_that_need_a_name(text: str, advice: str) -> None:
    """If no single valid name can be derived, the message shows how to give one."""
    with pytest.raises(AddressError) as caught:
        parse_served(text)
    assert advice in caught.value.message
