"""Addresses of servers that speak OpenAI's API.

openai+http://host[:port][/path][#model]   also openai+https
"""

from __future__ import annotations

from shoal.backends.base.address import parse_http
from shoal.models.address import Scheme

SCHEMES = dict.fromkeys(("openai+http", "openai+https"), Scheme(parse=parse_http, needs_model=True))
