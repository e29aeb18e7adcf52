"""Sources of images in requests: URLs, fetched only from hosts that the operator allows, data URIs and raw base64.

Nothing here decodes an image, and nothing opens a file.
"""
