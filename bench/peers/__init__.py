"""Shoal beside its peers: embedding servers on one model, gateways before one server, all in one run."""
