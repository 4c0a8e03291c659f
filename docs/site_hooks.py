"""Hooks of the site: pages that stand at the root of the repository, links out of docs/, and the package as a wheel has it."""

import hashlib
import re
import shutil
from pathlib import Path

from mkdocs.plugins import event_priority
from mkdocs.structure.files import File

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "build" / "package" / "moeblaze_ops"

FROM_ROOT = {
    "index.md": "README.md",
    "design.md": "DESIGN.md",
    "contributing.md": "CONTRIBUTING.md",
    "changelog.md": "CHANGELOG.md",
    "notes.md": "benchmarks/NOTES.md",
    "tests.md": "tests/README.md",
    "results/layer_h200.png": "benchmarks/results/layer_h200.png",
    "results/memory_scaling_h200.png": "benchmarks/results/memory_scaling_h200.png",
    "license.md": "LICENSE",
    "citation.cff": "CITATION.cff",
}
"""Files of the site that have their place elsewhere in the repository."""


_LINK = re.compile(r"\]\(([^)#\s]*)(#[^)\s]*)?\)")
_DIAGRAM = re.compile(r"^```mermaid\n(.*?)^```$", flags=re.MULTILINE | re.DOTALL)


def name_of_diagram(source):
    """The file in docs/diagrams that shows a diagram of Mermaid: the site draws nothing itself, which would take a network."""
    return f"{hashlib.sha256(source.encode()).hexdigest()[:12]}.svg"


@event_priority(100)
def on_config(config):
    """Lays out the package as it is installed: in a checkout ``kernels`` and ``lowering`` are its siblings.

    It comes before what mkdocstrings does, which forgets a folder that is not there yet.
    """
    shutil.rmtree(PACKAGE, ignore_errors=True)
    shutil.copytree(ROOT / "moeblaze_ops", PACKAGE, ignore=shutil.ignore_patterns("__pycache__"))
    for folder in ("kernels", "lowering"):
        shutil.copytree(ROOT / folder, PACKAGE / folder, ignore=shutil.ignore_patterns("__pycache__"))
        for place in (PACKAGE / folder, *(PACKAGE / folder).rglob("*/")):
            (place / "__init__.py").touch()  # what reads the sources looks into regular packages only
    return config


def on_files(files, config):
    for name, source in FROM_ROOT.items():
        content = (ROOT / source).read_bytes()
        files.append(File.generated(config, name, content=content))
    return files


def _code(block):
    """What has no language is drawn of characters: its lines stay whole, which those of outputs do not."""
    return block.replace("```\n", "``` {.text .drawing}\n", 1) if block.startswith("```\n") else block


def on_page_markdown(markdown, page, **_):
    """Turns links that are right in the repository into links that are right in the site; the notes stay out of the search."""
    name = page.file.src_uri
    if name == "notes.md":
        page.meta["search"] = {"exclude": True}
    folder = (ROOT / FROM_ROOT.get(name, f"docs/{name}")).parent
    places = {(ROOT / source).resolve(): Path(target) for target, source in FROM_ROOT.items()}

    def moved(match):
        link, anchor = match[1], match[2] or ""
        if "://" in link or not link:
            return match[0]
        path = (folder / link).resolve()
        target = places.get(path) or path.relative_to(ROOT / "docs")
        return f"]({up}{target.as_posix()}{anchor})"

    up = "../" * name.count("/")
    parts = re.split(r"(^```.*?^```$)", markdown, flags=re.MULTILINE | re.DOTALL)
    markdown = "".join(_code(part) if part.startswith("```") else _LINK.sub(moved, part) for part in parts)
    return _DIAGRAM.sub(lambda match: f"![diagram]({up}diagrams/{name_of_diagram(match[1])})", markdown)
