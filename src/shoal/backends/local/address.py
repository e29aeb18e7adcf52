"""Address schemes of file-based models, which this machine runs itself."""

from __future__ import annotations

from shoal.models.address import FILE_SCHEMES

SCHEMES = FILE_SCHEMES
