"""Words with which servers say how an answer ended."""

ABORTED_REASONS = ("abort", "aborted", "cancelled", "timeout", "error")
"""The answer is not all that the model would have said: words of vLLM, SGLang and TensorRT-LLM, in lower case."""
