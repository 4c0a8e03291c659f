"""A digest of our source files, taken when the package is imported.

Later would be too late: a file that is edited while a process runs must not lend its digest to the code of before.
"""

import hashlib
import zipfile
from collections.abc import Iterable, Iterator
from pathlib import Path

DIGEST = ""
"""Of the sources that were imported: ``moeblaze_ops`` takes it before it imports anything else of ours."""


def digest(package_path: Iterable[str], version: str) -> str:
    """Hash of every Python file, at all depths, of the package with this ``__path__``, ``kernels`` and ``lowering`` included.

    Where an application has no sources, in a folder or a zip file, it is that of the bytecode (``.pyc``) there. Where a
    loader of its own hides both (a frozen executable), it is that of ``version``: caches on disk are then good for one
    version of the package, and one that is built from changed sources under the same version must not share them.
    """
    package, *others = map(Path, package_path)
    folders = [package, *(parent / name for parent in others for name in ("kernels", "lowering"))]
    for suffix in (".py", ".pyc"):
        result, found = hashlib.sha256(), False
        for folder in folders:
            for name, content in sorted(_files(folder, suffix)):
                result.update(f"{folder.name}/{name} {len(content)} ".encode())
                result.update(content)
                found = True
        if found:
            return result.hexdigest()
    return hashlib.sha256(f"version {version}".encode()).hexdigest()


def _files(folder: Path, suffix: str) -> Iterator[tuple[str, bytes]]:
    """The files with this suffix under a folder, which may be one inside a zip file: path from there, and content."""
    if folder.is_dir():
        for file in folder.rglob(f"*{suffix}"):
            yield file.relative_to(folder).as_posix(), file.read_bytes()
        return
    archive = next((parent for parent in folder.parents if parent.is_file()), None)
    if archive is None or not zipfile.is_zipfile(archive):
        return
    inside = folder.relative_to(archive).as_posix() + "/"
    with zipfile.ZipFile(archive) as opened:
        for name in opened.namelist():
            if name.startswith(inside) and name.endswith(suffix):
                yield name.removeprefix(inside), opened.read(name)
