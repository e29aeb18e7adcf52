"""A program with tritonserver's command line and gRPC readiness, which behaves as a test asks."""

from __future__ import annotations

import sys
from pathlib import Path

from shoal.backends.triton.distribution import Distribution
from shoal.backends.triton.server import Installation

_PROGRAM = """\
#!{python} -I
import os, signal, socket, sys, time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

options = dict(one[2:].split("=", 1) for one in sys.argv[1:])
folder = Path(__file__).parent
with open(folder / "starts", "a") as file:
    file.write(" ".join(sys.argv[1:]) + "\\n")
print("fake server", os.getpid(), flush=True)
starts = len((folder / "starts").read_text().splitlines())

{behaviour}
import grpc
from shoal.kserve import protocol_pb2 as pb

ANSWERS = dict(
    ServerReady=pb.ServerReadyResponse(ready=True),
    ServerMetadata=pb.ServerMetadataResponse(name="triton", version="9.9"),
)

class Replies(grpc.GenericRpcHandler):
    def service(self, call):
        answer = ANSWERS[call.method.rpartition("/")[2]].SerializeToString()
        return grpc.unary_unary_rpc_method_handler(lambda *_: answer)

server = grpc.server(ThreadPoolExecutor(1), handlers=[Replies()])
server.add_insecure_port(options["grpc-address"] + ":" + options["grpc-port"])
server.start()
ports = [int(options[name]) for name in ("http-port", "metrics-port") if name in options]
opened = [socket.create_server(("127.0.0.1", port)) for port in ports]
server.wait_for_termination()
"""

DIES = 'sys.exit("it cannot be")'
DIES_LATER = 'if starts > 1: sys.exit("not again")'
CLASHES_ONCE = """if starts == 1: sys.exit("Socket '127.0.0.1:1' already in use")"""
CLASHES = """sys.exit("Socket '127.0.0.1:1' already in use")"""
LATE = "time.sleep(600)"
HANGS = """
def hang(number, frame):
    if starts == 1:
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGSEGV])
    print("Signal (11) received.", flush=True)
    time.sleep(600)
signal.signal(signal.SIGUSR1, hang)
"""
STUBBORN = "signal.signal(signal.SIGTERM, signal.SIG_IGN)"


class FakeServer:
    """The program in `folder`; `starts` are its command lines so far."""

    def __init__(self, folder: Path, behaviour: str = "") -> None:
        folder.mkdir()
        self.folder = folder
        self.binary = folder / "tritonserver"
        self.binary.write_text(_PROGRAM.format(python=sys.executable, behaviour=behaviour))
        self.binary.chmod(0o755)
        (folder / "backends" / "python").mkdir(parents=True)
        (folder / "backends" / "python" / "libtriton_python.so").touch()

    @property
    def installed(self) -> Installation:
        return Installation(Distribution(self.binary, self.folder / "backends", self.folder / "caches"), None)

    @property
    def starts(self) -> list[str]:
        return (self.folder / "starts").read_text().splitlines()
