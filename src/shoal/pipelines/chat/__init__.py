"""Conversations to what a model reads, and what it brings forth to answers."""
