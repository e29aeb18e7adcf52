"""Machine facts."""

from __future__ import annotations

import msgspec

from shoal.bench.machine import cpu_info, describe_machine


def test_the_first_processor_is_read() -> None:
    """Keys and values of the first block; later processors do not matter."""
    text = "processor\t: 0\nmodel name\t: Chip: X\nflags\t\t: avx2 amx_bf16\n\nprocessor\t: 1\nmodel name\t: Other\n"
    assert cpu_info(text) == {"processor": "0", "model name": "Chip: X", "flags": "avx2 amx_bf16"}


def test_without_cpuinfo_facts_are_empty() -> None:
    """A system without /proc gives an empty table."""
    assert cpu_info("") == {}


def test_facts_of_this_machine_are_json() -> None:
    """They are JSON, contain this package's version, and omit packages that are not installed."""
    facts = describe_machine(("shoal", "no-such-distribution"))
    assert list(facts.versions) == ["shoal"]
    assert facts.cores >= 1
    assert msgspec.json.decode(msgspec.json.encode(facts))["processor"] == facts.processor
