"""The PyTorch engine runs any text model that transformers supports, straight from its folder.

It runs on a GPU in 16 bits, else on the CPU in f32. It is the GPU path, and the fallback for models without a graph. It
reads no pickles and runs no model code: weights are safetensors, and architectures are those of transformers. Pooling
and heads run on the device in f32, so that only results are transferred. A batch without padding is run without a mask,
because PyTorch's flash attention takes none. On a GPU two batches are in flight on one stream: while one computes, the
other is prepared and queued behind it. Each is one call there, a recording of all its kernels (see `graphs`). On the
CPU there is one batch, because its operators use all threads.
"""

from shoal.backends.local.torch.engine import open

__all__ = ["open"]
