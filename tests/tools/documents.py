"""The code in README.md and docs/: run as a reader would type it, and compared with the output that the page shows.

A page is one program. Each ``python`` block is a file of its own (``title="moe.py"`` names it, else it is ``step_N.py``); the
blocks run in order, in one process and with one set of names. A ``text`` block shows what the ``python`` or ``torchrun``
block before it prints. A file that ``torchrun`` runs is only written before. Files named ``cell_N.py`` run as cells of a
notebook do, without a file: a notebook's code cells are such blocks.

    python tests/tools/documents.py README.md docs/*.md docs/*.ipynb    # run the pages and write the real outputs into them
"""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.tools.programs import printed_by

RUN_PAGE = """
import linecache, sys
import torch._functorch.config, torch._inductor.config

# A graph out of a cache was not compiled, and the page may be about what was.
torch._inductor.config.fx_graph_cache = torch._functorch.config.enable_autograd_cache = False
_, *files = sys.argv
names = {"__name__": "__main__"}
for file in files:
    print("<<<", file, flush=True)
    with open(file) as opened:
        source = opened.read()
    if file.startswith("cell_"):
        # A notebook has no files: it puts the lines of a cell where tracebacks look for them.
        file = f"<{file.removesuffix('.py')}>"
        linecache.cache[file] = len(source), None, source.splitlines(keepends=True), file
    exec(compile(source, file, "exec"), names)
"""

_BLOCK = re.compile(r"^```(?P<language>\w+)(?P<options>[^\n]*)\n(?P<content>.*?)^```$", flags=re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Block:
    """A fenced block of a page, and where its content stands in the page's text."""

    language: str
    options: str
    content: str
    span: tuple[int, int]

    @property
    def title(self) -> str | None:
        found = re.search(r'title="([^"]+)"', self.options)
        return found[1] if found else None

    @property
    def is_launch(self) -> bool:
        return self.language == "bash" and self.content.startswith("torchrun ")


def blocks(page: Path) -> list[Block]:
    if page.suffix == ".ipynb":
        return list(_cells(json.loads(page.read_text())))
    return [Block(m["language"], m["options"], m["content"], m.span("content")) for m in _BLOCK.finditer(page.read_text())]


def _cells(notebook: dict) -> Iterator[Block]:
    """The code cells of a notebook, each with what it printed; for their places, numbers."""
    codes = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    for number, cell in enumerate(codes, start=1):
        yield Block("python", f'title="cell_{number}.py"', "".join(cell["source"]) + "\n", (number, 0))
        if printed := "".join("".join(output["text"]) for output in cell["outputs"]):
            yield Block("text", "", printed, (number, 1))


def shown_outputs(page: Path) -> list[tuple[Block, Block]]:
    """Each block that runs, with the ``text`` block that shows its output."""
    found, source = [], None
    for block in blocks(page):
        if block.language == "python" or block.is_launch:
            source = block
        elif block.language == "text" and source is not None:
            found.append((source, block))
            source = None
    return found


def run_page(page: Path, folder: Path) -> dict[tuple[int, int], str]:
    """Runs a page in ``folder``; returns what each block printed, by the block's place in the page."""
    printed, files = {}, {}
    launched = {block.content.split()[-1] for block in blocks(page) if block.is_launch}
    for number, block in enumerate(block for block in blocks(page) if block.language == "python"):
        name = block.title or f"step_{number + 1}.py"
        (folder / name).write_text(block.content)
        if name not in launched:
            files[name] = block
    _install(folder)
    parts = printed_by("-c", RUN_PAGE, *files, folder=folder).split("<<< ")[1:]
    for part in parts:
        name, _, output = part.partition("\n")
        printed[files[name].span] = output.replace(f"{folder}/", "")
    for block in blocks(page):
        if block.is_launch:
            printed[block.span] = printed_by(*block.content.split(), folder=folder).replace(f"{folder}/", "")
    return printed


def _install(folder: Path) -> None:
    """Makes the package's entry points known to what runs in ``folder``, as an installation would."""
    metadata = folder / "moeblaze-0.dist-info"
    metadata.mkdir(exist_ok=True)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: moeblaze\nVersion: 0\n")
    (metadata / "entry_points.txt").write_text("[torch_dynamo_backends]\nmoeblaze = moeblaze_ops.compile:moeblaze_backend\n")


def replaced_functions() -> str:
    """The table of DESIGN.md: what of torch is replaced, and why."""
    from moeblaze_ops.lowering.patches import PATCHES, short

    names: dict[str, list[str]] = {}
    for name, patch in PATCHES.items():
        owner, attributes = short(name).split(".")
        names.setdefault(patch.why, []).append(" or ".join(f"`{owner}.{attribute}`" for attribute in attributes.split("|")))
    rows = [f"| {', '.join(functions)} | {why} |" for why, functions in names.items()]
    return "\n".join([_HEADER, "|---|---|", *rows, ""])


_HEADER = "| replaced | why |"


def write_replaced_functions(page: Path) -> None:
    before, _, after = page.read_text().partition(_HEADER)
    page.write_text(before + replaced_functions() + after[after.index("\n\n") + 1 :])


def write_outputs(page: Path, folder: Path) -> None:
    """Replaces the outputs that a page shows by the real ones."""
    if _HEADER in page.read_text():
        return write_replaced_functions(page)
    pairs, text = shown_outputs(page), page.read_text()
    printed = run_page(page, folder)
    if page.suffix == ".ipynb":
        return write_cells(page, printed)
    for source, shown in reversed(pairs):
        start, end = shown.span
        text = text[:start] + printed[source.span] + text[end:]
    page.write_text(text)


def write_cells(page: Path, printed: dict[tuple[int, int], str]) -> None:
    notebook = json.loads(page.read_text())
    for number, cell in enumerate((cell for cell in notebook["cells"] if cell["cell_type"] == "code"), start=1):
        text = printed[number, 0].splitlines(keepends=True)
        cell["outputs"] = [{"name": "stdout", "output_type": "stream", "text": text}] if text else []
        cell["execution_count"] = number
    page.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    import argparse
    import tempfile

    parser = argparse.ArgumentParser(description="Run pages, and write what their code prints into them.")
    parser.add_argument("pages", nargs="+", type=Path)
    for name in parser.parse_args().pages:
        with tempfile.TemporaryDirectory() as temporary:
            write_outputs(name, Path(temporary))
            print(name)
