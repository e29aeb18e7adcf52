"""Models on this machine: their addresses, the sources they come from, and the store that keeps them."""
