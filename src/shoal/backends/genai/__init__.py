"""Backend for language models on the local CPU: OpenVINO GenAI with continuous batching.

Its pipeline holds the GIL during each step (17 ms per token, 325 ms for a prompt of 250 tokens with 0.2 billion
parameters on two cores), so a thread of the gateway would block the event loop. The pipeline therefore runs in its own
process: `worker` steps it and sends the results over a socket, and `generator` is the gateway's end.
"""

from shoal.backends.genai.generator import GenaiGenerator, start_generator
from shoal.backends.genai.messages import GenaiOptions

__all__ = ["GenaiGenerator", "GenaiOptions", "start_generator"]
