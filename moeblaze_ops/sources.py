"""A digest of our source files, taken when the package is imported.

Later would be too late: a file that is edited while a process runs must not lend its digest to the code of before.
"""

import hashlib
from collections.abc import Iterable
from pathlib import Path

import moeblaze_ops


def digest(package_path: Iterable[str]) -> str:
    """Hash of every Python file of the package, of ``kernels`` and of ``lowering``, wherever they are."""
    package, *others = map(Path, package_path)
    folders = [package, *(parent / name for parent in (package, *others) for name in ("kernels", "lowering"))]
    result = hashlib.sha256()
    for file in (file for folder in folders for file in sorted(folder.glob("*.py"))):
        content = file.read_bytes()
        result.update(f"{file.parent.name}/{file.name} {len(content)} ".encode())
        result.update(content)
    return result.hexdigest()


DIGEST = digest(moeblaze_ops.__path__)
