"""Files of requests that run in the background: OpenAI's batches, without HTTP.

`lines` reads and writes lines, `objects` holds the state of files and batches, `store` keeps both on disk, `run` runs
one batch, and `desk` all of them.
"""

from __future__ import annotations

from shoal.batches.desk import BatchDesk, Identity, Limits

__all__ = ["BatchDesk", "Identity", "Limits"]
