"""The KServe v2 protocol with Triton's extensions: its messages and its tensors, for clients and for servers."""

SERVICE = "/inference.GRPCInferenceService/"
"""The gRPC path of every call, before its name."""

EMPTY_FINAL = "triton_enable_empty_final_response"
"""Request parameter: end the responses with an empty one that is marked as final."""

SPARSE_VALUES = "sparse_values"
"""Output of a Shoal that embeds: the weights of sparse vectors, which are no dense ones."""

FINAL = "triton_final_response"
"""Response parameter: whether no response follows."""
