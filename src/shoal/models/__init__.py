"""Models on this machine: their addresses, the sources they come from, the store that keeps them."""
