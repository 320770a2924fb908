"""Machine code that a wheel brings along: ``csrc/cubin/`` with a manifest.

The manifest has the version of the NVRTC that compiled it, and for each file a digest of what it
was compiled from and one of its bytes. Code whose source is not the installed one, or that is
damaged, counts as missing.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

DIRECTORY = "cubin"
"""Below csrc."""

_MANIFEST = "manifest.json"


@dataclass(frozen=True)
class Entry:
    """One packaged file.

    Attributes:
        source: of ``csrc/<source>.cu``.
        architecture: as NVRTC names it.
        digest: of the source with its includes, the architecture and the compiler's options.
        sha256: of the file.
    """

    source: str
    architecture: str
    digest: str
    sha256: str

    @property
    def file(self) -> str:
        """Its name."""
        return f"{self.source}-{self.architecture}.cubin"


@dataclass(frozen=True)
class Manifest:
    """What a directory of packaged code has.

    Attributes:
        nvrtc: version of the compiler.
        entries: one for each file.
    """

    nvrtc: tuple[int, int]
    entries: tuple[Entry, ...]

    def find(self, digest: str) -> Entry | None:
        """The entry of a source as it is now; ``None`` where there is none."""
        return next((entry for entry in self.entries if entry.digest == digest), None)


def manifest(directory: Path) -> Manifest | None:
    """The manifest; ``None`` where it is missing (as in a clone) or unreadable."""
    try:
        found = json.loads((directory / _MANIFEST).read_text(encoding="utf-8"))
        major, minor = map(int, found["nvrtc"])
        return Manifest((major, minor), tuple(Entry(**entry) for entry in found["entries"]))
    except (OSError, ValueError, TypeError, KeyError):
        return None


def read(directory: Path, entry: Entry) -> bytes | None:
    """The machine code of an entry; ``None`` where it is missing or damaged."""
    try:
        code = (directory / entry.file).read_bytes()
    except OSError:
        return None
    return code if hashlib.sha256(code).hexdigest() == entry.sha256 else None


def write(
    directory: Path,
    nvrtc: tuple[int, int],
    architecture: str,
    cubins: Mapping[str, tuple[str, bytes]],
) -> Manifest:
    """Fill an empty directory.

    Args:
        directory: made if need be.
        nvrtc: version of the compiler.
        architecture: of all of them.
        cubins: digest and machine code by source.
    """
    directory.mkdir(parents=True, exist_ok=True)
    entries = []
    for source, (digest, code) in sorted(cubins.items()):
        entry = Entry(source, architecture, digest, hashlib.sha256(code).hexdigest())
        (directory / entry.file).write_bytes(code)
        entries.append(entry)
    made = {"nvrtc": nvrtc, "entries": [asdict(entry) for entry in entries]}
    (directory / _MANIFEST).write_text(json.dumps(made, indent=2) + "\n", encoding="utf-8")
    return Manifest(nvrtc, tuple(entries))
