"""Servers that speak OpenAI's API: requests passed on as they came, streams passed back byte for byte, embeddings."""
