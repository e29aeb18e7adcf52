"""NVIDIA Triton: its gRPC protocol, its models, and a server of one's own."""
