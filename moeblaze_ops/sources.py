"""A digest of our source files, taken when the package is imported.

Later would be too late: a file that is edited while a process runs must not lend its digest to the code of before.
"""

import hashlib
from collections.abc import Iterable
from pathlib import Path

DIGEST = ""
"""Of the sources that were imported: ``moeblaze_ops`` takes it before it imports anything else of ours."""


def digest(package_path: Iterable[str]) -> str:
    """Hash of every Python file, at all depths, of the package with this ``__path__``, ``kernels`` and ``lowering`` included."""
    package, *others = map(Path, package_path)
    folders = [package, *(parent / name for parent in others for name in ("kernels", "lowering"))]
    result = hashlib.sha256()
    for folder in folders:
        for file in sorted(folder.rglob("*.py")):
            content = file.read_bytes()
            result.update(f"{folder.name}/{file.relative_to(folder).as_posix()} {len(content)} ".encode())
            result.update(content)
    return result.hexdigest()
