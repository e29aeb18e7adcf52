"""OpenVINO GenAI: language models on the processor of this machine, with continuous batching.

Its pipeline holds Python's global lock for the whole of every step (17 ms a token, 325 ms for a prompt of 250 tokens
with 0.2 billion parameters on two cores), so that a thread of the gateway's would stop its event loop. It therefore
runs in a process of its own: `worker` steps it and tells what came of it over a socket, `generator` is this end.
"""

from shoal.backends.genai.generator import GenaiGenerator, start_generator
from shoal.backends.genai.messages import GenaiOptions

__all__ = ["GenaiGenerator", "GenaiOptions", "start_generator"]
