"""Pipelines turn items into tensors and engine outputs into rows. CPU only; import just the module for the kind you
need."""
