"""Hugging Face text-embeddings-inference as a place where models run: one server, one model, over HTTP."""
