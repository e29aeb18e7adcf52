"""The model.py files that Triton's python backend runs. Shoal copies them into a model repository and never imports
them: they run in Triton's own Python, so they do not depend on Shoal."""
