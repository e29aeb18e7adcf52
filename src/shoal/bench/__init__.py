"""A load generator for embedding servers: distinct texts, closed and open loop, honest percentiles."""
