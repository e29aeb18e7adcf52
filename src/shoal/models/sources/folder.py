"""`file:`: a model's folder on this machine, used where it is."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import msgspec

from shoal.errors import SourceError
from shoal.models.address import Address
from shoal.models.sources.access import Fetched, Job


def resolve(address: Address) -> Address:
    """The same folder by its real absolute path, with a fingerprint of its files as the revision.

    The fingerprint covers names, sizes and times, so it costs no reading. Raises SourceError when no model is there.
    """
    path = Path(address.target).expanduser()
    try:
        path = path.resolve(strict=True)
        if not path.is_dir():
            raise SourceError(f"{address} is a file: name the folder that holds the model")
        if not any((path / name).is_file() for name in ("config.json", "modules.json")):
            raise SourceError(f"{address} holds neither config.json nor modules.json: name the model's own folder")
        lines = sorted(_describe(path))
    except FileNotFoundError:
        raise SourceError(f"{address} does not exist: check the path") from None
    except OSError as error:
        raise SourceError(f"{address} cannot be read: {error.strerror}") from error
    fingerprint = hashlib.sha256("".join(lines).encode()).hexdigest()[:32]
    return msgspec.structs.replace(address, target=str(path), revision=fingerprint)


def fetch(job: Job) -> Fetched:
    """Nothing is copied: the answer points to the folder itself."""
    address = resolve(job.address)
    return Fetched(Path(address.target), address)


def _describe(folder: Path) -> list[str]:
    lines = []
    for root, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".")]
        for name in names:
            stat = os.stat(os.path.join(root, name))
            lines.append(f"{os.path.relpath(os.path.join(root, name), folder)}\t{stat.st_size}\t{stat.st_mtime_ns}\n")
    return lines
