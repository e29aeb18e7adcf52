"""A server's state on disk: its owner, whether it is stale, and leftovers in shared memory."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from pathlib import Path
from select import select

import msgspec
import pytest

from shoal.backends.triton.run_state import (
    Process,
    RunFolder,
    State,
    end_session,
    find_process,
    process_start,
    remove_remains,
    remove_shared_memory,
    run_folders,
)


def state(**changes: object) -> State:
    made = State(
        owner="up",
        supervisor=find_process(os.getpid()),
        http_port=1,
        grpc_port=2,
        metrics_port=3,
        repository="/models",
        binary="/bin/tritonserver",
        since=0.0,
    )
    return msgspec.structs.replace(made, **changes)


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    return RunFolder(tmp_path / "run" / "8001")


def test_a_process_is_itself_until_it_ends() -> None:
    """An ended process, even a zombie, and a reused id are detected."""
    with subprocess.Popen(["sleep", "60"]) as child:
        one = find_process(child.pid)
        other = Process(child.pid, one.started + 1)
        assert one.is_alive()
        assert not other.is_alive()
        assert not other.signal(signal.SIGKILL)
        assert child.poll() is None
        assert one.signal(signal.SIGKILL)
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        assert process_start(child.pid) is None, "its remains are not it"
    assert not one.is_alive()
    assert not one.signal(signal.SIGKILL)


def test_one_process_has_a_folder_at_a_time(folder: RunFolder) -> None:
    """Until it releases the folder, or ends."""
    assert not folder.is_supervised()
    assert folder.claim()
    assert folder.is_supervised()
    assert not RunFolder(folder.path).claim()
    folder.release(keep_log=True)
    assert not folder.is_supervised()
    claim = f"print(RunFolder(Path({str(folder.path)!r})).claim(), flush=True)"
    code = f"from shoal.backends.triton.run_state import *; {claim}"
    child = subprocess.Popen([sys.executable, "-c", f"{code}; input()"], stdin=-1, stdout=-1, text=True)
    with child:
        assert child.stdout is not None
        assert child.stdout.readline() == "True\n"
        assert folder.is_supervised()
        child.kill()
        child.wait()
    assert folder.claim()
    folder.release(keep_log=False)
    assert not folder.path.exists()


def test_a_state_round_trips_and_is_forgotten(folder: RunFolder) -> None:
    """`release` deletes it, and keeps the log if requested."""
    assert folder.read() is None
    folder.claim()
    expected = state(phase="ready", server=find_process(os.getpid()))
    folder.write(expected)
    folder.note("a line")
    assert folder.read() == expected
    folder.release(keep_log=True)
    assert folder.read() is None
    assert folder.tail(9) == "shoal: a line"


def test_a_state_that_cannot_be_written_leaves_no_file(folder: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise OSError(errno.ENOSPC, "full")

    assert folder.claim()
    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="full"):
        folder.write(state())
    assert [path.name for path in folder.path.iterdir()] == ["lock"]
    folder.release(keep_log=False)


def test_a_folder_that_cannot_be_cleared_is_released(folder: RunFolder) -> None:
    assert folder.claim()
    (folder.path / "state.json").mkdir()
    with pytest.raises(OSError, match=r"state\.json"):
        folder.release(keep_log=True)
    assert not folder.is_supervised()


def test_a_broken_state_is_none(folder: RunFolder) -> None:
    folder.path.mkdir(parents=True)
    (folder.path / "state.json").write_text("{")
    assert folder.read() is None


def test_the_tail_of_a_log(folder: RunFolder) -> None:
    """The last lines, with any bytes; empty if there is no log."""
    assert folder.tail(5) == ""
    folder.path.mkdir(parents=True)
    folder.log.write_bytes(b"first\n" + b"x" * 100_000 + b"\nbad \xff\nlast\n")
    assert folder.tail(2) == "bad \N{REPLACEMENT CHARACTER}\nlast"


def test_claiming_clears_what_a_killed_one_left(folder: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    """As recorded in its state."""
    cleared: list[State] = []
    monkeypatch.setattr("shoal.backends.triton.run_state.remove_remains", cleared.append)
    folder.path.mkdir(parents=True)
    left = state(shm_prefix="shoal_triton_2_ab_")
    folder.write(left)
    folder.claim()
    assert cleared == [left]
    folder.release(keep_log=False)


def test_only_its_own_shared_memory_is_removed(tmp_path: Path) -> None:
    """A foreign or empty prefix removes nothing; a missing folder is not an error."""
    for name in ("shoal_triton_2_ab_x", "shoal_triton_2_cd_x", "other"):
        (tmp_path / name).touch()
    for prefix in ("", "oth", "shoal_triton_2_ab_"):
        remove_shared_memory(prefix, tmp_path)
    remove_shared_memory("shoal_triton_2_", tmp_path / "none")
    assert {path.name for path in tmp_path.iterdir()} == {"shoal_triton_2_cd_x", "other"}


SESSION = """\
import os, subprocess
child = subprocess.Popen(["/bin/sleep", "60"])
print(child.pid, flush=True)
child.wait()
"""


def test_a_dead_server_s_busy_children_are_ended() -> None:
    """Although the server is gone; a session whose number was reused is left alone."""
    command = [sys.executable, "-IS", "-c", SESSION]
    with subprocess.Popen(command, stdin=-1, stdout=-1, text=True, start_new_session=True) as leader:
        assert leader.stdout is not None
        child = find_process(int(leader.stdout.readline()))
        server = find_process(leader.pid)
        end_session(Process(server.pid, server.started + 1))
        assert server.is_alive()
        leader.kill()
        leader.wait()
        assert child.is_alive()
        with os.fdopen(os.pidfd_open(child.pid)) as ended:
            remove_remains(state(server=server))
            assert leader.stdout.read() == "", "the child had the pipe, too"
            assert select([ended], [], [], 30)[0], "a process closes its pipes a moment before it ends"
    assert not child.is_alive()


def test_folders_by_port(tmp_path: Path) -> None:
    """Other files are skipped; a missing folder has none."""
    for name in ("8001", "80", "supervisor.log"):
        (tmp_path / name).mkdir()
    assert [folder.path.name for folder in run_folders(tmp_path)] == ["80", "8001"]
    assert list(run_folders(tmp_path / "none")) == []
