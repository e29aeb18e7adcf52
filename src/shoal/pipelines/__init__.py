"""Items to tensors and back. Pure CPU work; import the module of the kind that is needed."""
