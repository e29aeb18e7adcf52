"""Models for assistants: a server of the Model Context Protocol on standard input and output, by the SDK `mcp`.

Protocol: https://modelcontextprotocol.io/specification. It is `shoal.open` behind a few tools; `shoal mcp` runs it.
"""
