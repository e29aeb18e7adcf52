"""Sources of pictures in requests: URLs, fetched only from hosts that the operator allows, data URIs and raw base64.

Nothing here decodes a picture, and nothing opens a file.
"""
