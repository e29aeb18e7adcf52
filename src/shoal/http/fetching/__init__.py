"""The ways that pictures come: a URL that a client sent, fetched only from where the operator allows it; a data URI;
raw base64. Nothing here knows what a picture is, and nothing opens a file."""
