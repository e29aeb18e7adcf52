"""OpenAI's Responses API: passed on to servers that speak it, else translated to conversations and functions."""
