"""Read the tensors of PyTorch's pickled weights (`torch.save`) without PyTorch, and run nothing in them."""

from shoal.models.convert.pickled.reader import StoredTensor, read_tensors
from shoal.models.convert.pickled.writer import write_safetensors

__all__ = ["StoredTensor", "read_tensors", "write_safetensors"]
