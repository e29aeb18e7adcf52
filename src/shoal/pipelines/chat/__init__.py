"""Convert conversations to prompts, and model output to answers."""
