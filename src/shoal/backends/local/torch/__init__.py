"""PyTorch: any text model that transformers knows, straight from its folder; on a GPU in 16 bits, else on the CPU in
f32. The GPU path, and the fallback for what has no graph.

No pickle is read and no code of a model is run: weights are safetensors, architectures those of transformers. Pooling
and heads run on the device in f32, so that only results travel. A batch without padding goes without a mask, because
PyTorch's flash attention takes none.

On a GPU two batches are in flight on one stream: while one computes, the other is prepared and queued behind it. On the
CPU there is one, because its operators use all threads.
"""

from shoal.backends.local.torch.engine import open

__all__ = ["open"]
