"""Whole files through a model: rows in, shards out, in an order and at a place that a restart finds again."""
