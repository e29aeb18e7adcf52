"""The pure parts of bench/peers: the table of peers, processor time of a process tree, figures; and the stub."""

from __future__ import annotations

import json
import os
import re
import string
from pathlib import Path

import pytest

from bench.openai_stub import DIMENSION, EMBEDDINGS_PATH, EVENTS, MODEL, TOKENS, choose_reply
from bench.peers.environments import Unavailable, last_lines, run
from bench.peers.figures import CPU, P50, RATE, Figures, Rounds, compare, cosine, turned
from bench.peers.processes import Stat, find_tree, read_stat, tree_cpu_s
from bench.peers.table import ENVIRONMENTS, ONNX_EXPORT, PEERS, TORCH, Peer

ROOT = Path(__file__).parents[3]
PLACES = {"bin", "binary", "port", "side_port", "upstream", "upstream_host", "upstream_port", "model", "onnx", "work"}
PLACES |= {"threads"}
PINNED = re.compile(r"[A-Za-z0-9._-]+(\[[a-z,]+\])?==[0-9][0-9a-z.]*")


def templates(peer: Peer) -> list[str]:
    return [*peer.command, *peer.variables.values(), *peer.files.values()]


def test_every_package_has_an_exact_version() -> None:
    """No peer changes from one run to the next, and PyTorch is the one of the parity tests."""
    packages = [package for environment in ENVIRONMENTS.values() for package in environment.packages]
    assert [package for package in packages if not PINNED.fullmatch(package)] == []
    assert f"TORCH := {TORCH.partition('==')[2]}\n" in (ROOT / "Makefile").read_text()


def test_every_environment_has_a_peer() -> None:
    """And every peer that is installed has an environment."""
    assert {peer.environment for peer in PEERS if peer.environment} == set(ENVIRONMENTS)


@pytest.mark.parametrize("peer", PEERS, ids=lambda peer: peer.name)
def test_a_peer_is_installed_or_given(peer: Peer) -> None:
    """Each is one of both; who has to build it is told how."""
    assert bool(peer.environment) != bool(peer.binary_variable)
    assert bool(peer.build) == bool(peer.binary_variable)
    assert peer.ready.startswith("/")
    assert any(("$bin/" if peer.environment else "$binary") in part for part in peer.command)


@pytest.mark.parametrize("peer", PEERS, ids=lambda peer: peer.name)
def test_templates_name_only_known_places(peer: Peer) -> None:
    """A typo would only show once the peer is installed."""
    used = {name for text in templates(peer) for name in string.Template(text).get_identifiers()}
    assert used <= PLACES
    assert "port" in used
    assert all(string.Template(text).is_valid() for text in templates(peer))


def test_names_differ() -> None:
    """Results are kept by name."""
    assert len({peer.name for peer in PEERS}) == len(PEERS)
    assert set(string.Template(" ".join(ONNX_EXPORT)).get_identifiers()) == {"bin", "model", "onnx"}


def test_configurations_are_well_formed() -> None:
    """JSON files parse once they are filled in."""
    filled = dict.fromkeys(PLACES, "1")
    files = [(name, text) for peer in PEERS for name, text in peer.files.items() if name.endswith(".json")]
    assert files
    for _, text in files:
        assert isinstance(json.loads(string.Template(text).substitute(filled)), dict)


def test_a_name_with_brackets_does_not_shift_the_fields() -> None:
    """User, system and both times of waited-for children add up."""
    line = "7 (a) b (c)) S 3 7 5 0 -1 4194560 1 2 3 4 10 20 30 40 20 0 4 0 100"
    assert read_stat(line) == Stat(parent=3, session=5, ticks=100)


def test_a_tree_has_descendants_and_the_whole_session() -> None:
    """Grandchildren in sessions of their own, and orphans of the root's session."""
    stats = {
        1: Stat(0, 1, 0),
        10: Stat(1, 10, 0),
        11: Stat(10, 10, 0),
        12: Stat(11, 12, 0),
        13: Stat(1, 10, 0),
        20: Stat(1, 20, 0),
    }
    assert find_tree(10, stats) == {10, 11, 12, 13}


def test_processor_time_counts_the_whole_tree(tmp_path: Path) -> None:
    """Ticks of a process and its child, but not of a stranger."""
    for pid, parent, ticks in ((5, 1, 100), (6, 5, 50), (7, 1, 999)):
        (tmp_path / str(pid)).mkdir()
        (tmp_path / str(pid) / "stat").write_text(f"{pid} (x) S {parent} 1 {pid} 0 -1 0 0 0 0 0 {ticks} 0 0 0 20")
    (tmp_path / "self").mkdir()
    assert tree_cpu_s(5, tmp_path) == pytest.approx(150 / os.sysconf("SC_CLK_TCK"))
    with pytest.raises(ProcessLookupError):
        tree_cpu_s(8, tmp_path)


def figures(rate: float, cpu: float, p50: float = 1.0) -> Figures:
    return {RATE: rate, CPU: cpu, P50: p50}


def test_ratios_are_above_one_where_shoal_is_ahead() -> None:
    """Of rates it is Shoal's over the peer's, of processor time the peer's over Shoal's, by rounds."""
    rounds = Rounds()
    for scale in (1.0, 10.0, 2.0):  # a machine that slows down for everyone changes nothing
        rounds.add("Shoal", 16, figures(200 * scale, 50 / scale))
        rounds.add("peer", 16, figures(100 * scale, 200 / scale))
    assert rounds.ratios("Shoal", ["peer", "absent"]) == {
        "peer": {"rate, 16 clients": 2.0, "processor time, 16 clients": 4.0}
    }


def test_tables_hold_medians_by_clients() -> None:
    """One row a contender, one column a number of clients."""
    rounds = Rounds()
    for rate in (1.0, 3.0, 2.0):
        rounds.add("a", 1, figures(rate, 1))
        rounds.add("a", 64, figures(rate * 10, 1))
    assert rounds.table(RATE) == {"a": {"1 client": 2.0, "64 clients": 20.0}}
    rounds.drop("a")
    assert rounds.table(RATE) == {}


def test_added_time_is_over_the_base() -> None:
    """The difference within each round, at one client."""
    rounds = Rounds()
    for p50 in (1.0, 5.0, 2.0):
        rounds.add("direct", 1, figures(1, 1, p50))
        rounds.add("gateway", 1, figures(1, 1, p50 + 0.25))
    assert rounds.added("direct") == {"gateway": 0.25}


def test_rounds_that_were_not_shared_do_not_compare() -> None:
    """A contender that missed a round is no basis for a ratio."""
    with pytest.raises(ValueError, match="zip"):
        compare([figures(1, 1)], [figures(1, 1), figures(1, 1)], RATE)


def test_another_contender_begins_in_each_round() -> None:
    """All of them take part in each."""
    field = {"a": 1, "b": 2, "c": 3}
    assert [[name for name, _ in turned(field, turn)] for turn in range(3)] == [list("abc"), list("bca"), list("cab")]
    assert list(turned({}, 3)) == []


def test_cosine() -> None:
    """1 for the same direction, 0 for a right angle."""
    assert cosine([1, 2], [2, 4]) == pytest.approx(1)
    assert cosine([1, 0], [0, 3]) == 0


def test_a_failing_command_gives_its_reason() -> None:
    """The last lines of its output, without colors."""
    with pytest.raises(Unavailable, match=r"sh returned 3: no such package"):
        run(["sh", "-c", "echo no such package >&2; exit 3"], 30)
    with pytest.raises(Unavailable, match="no-such-program"):
        run(["no-such-program"], 30)
    assert last_lines("a\n\n\x1b[31mb\x1b[0m\n  c  d\n", lines=2) == "b | c d"


def test_the_stub_embeds_each_input() -> None:
    """A list gets as many vectors, in the encoding that is asked for."""
    for inputs, encoding, count in (("a text", None, 1), (["a", "b", "c"], "float", 3), (["a"], "base64", 1)):
        reply = choose_reply(EMBEDDINGS_PATH, {"model": MODEL, "input": inputs, "encoding_format": encoding})
        data = json.loads(reply.partition(b"\r\n\r\n")[2])["data"]
        assert [row["index"] for row in data] == list(range(count))
        assert len(data[0]["embedding"]) == (DIMENSION if encoding != "base64" else DIMENSION * 16 // 3)


def test_the_stub_streams_a_fixed_number_of_words() -> None:
    """The role, the words, the end and the marker."""
    assert len(EVENTS) == TOKENS + 3
    assert EVENTS[-1].endswith(b"data: [DONE]\n\n\r\n")
    assert choose_reply("/nothing", {}).startswith(b"HTTP/1.1 404")
