"""Random layers, with and without a change that makes them another function, through the rewrite.

Three properties: a compiled layer does what eager does, in outputs and their strides, all gradients, buffers and the state of
Python, changed or not; an unchanged layer that hides nothing is rewritten, as one layer; the rewrite raises nothing that
compiling without it does not raise.

    python tests/corpus/fuzz/run.py --seeds 0:10000 --jobs 16 --json fuzz.json
    python tests/corpus/fuzz/run.py --seeds 0: --seconds 3600

A failing seed is printed at once, with a program that shows it, and the summary comes even if the run is
stopped. ``--show SEED`` prints the program of any seed.
"""

import argparse
import copy
import inspect
import json
import linecache
import random
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from unittest import mock

import torch
import torch._dynamo
from torch import Tensor, fx, nn
from torch._dynamo.backends.debugging import aot_eager

sys.path[:0] = [str(Path(__file__).resolve().parents[3])]

from moeblaze_ops import compile as switch  # noqa: E402
from moeblaze_ops import config  # noqa: E402
from moeblaze_ops.lowering.rewrite.rewrite import Candidate  # noqa: E402
from tests.corpus.fuzz.grammar import draw  # noqa: E402
from tests.corpus.fuzz.hidden import deceive, hide  # noqa: E402
from tests.corpus.fuzz.layer import Layer  # noqa: E402
from tests.corpus.fuzz.modes import Kinked, TopkOfTies, as_on_a_gpu, unwritten_memory_is_nan  # noqa: E402
from tests.corpus.fuzz.mutations import mutate  # noqa: E402
from tests.corpus.fuzz.processes import results_of, until_stopped  # noqa: E402
from tests.tools.rewrite_harness import rewritten_in  # noqa: E402

torch.backends.opt_einsum.enabled = False  # by which eager's strides would follow sizes that only the data tell

AS_EXPECTED = ("rewritten", "compile differs", "tied scores", "rounded at a kink")  # of unchanged layers
UNCHANGED, HIDDEN, AGAIN = 0.35, 0.4, 0.15  # shares of the seeds
TRACED = 8  # one seed of so many goes through AOTAutograd as well, which takes a quarter of the time of one that does
# Of the largest value. fp64 programs with fp32 scores are held to those of fp32.
NOISE = {torch.float64: 1e-9, torch.float32: 2e-5, torch.bfloat16: 2**-6}
AMPLIFIED = 8  # errors of two orders of summation, as multiples of what eager itself is off by


@dataclass
class Case:
    """One seed's program. ``change`` says how it differs from the supported grammar."""

    seed: int
    layer: Layer
    change: str = ""

    def build(self) -> tuple[nn.Module, Tensor]:
        names: dict = {}
        file, source = f"<seed {self.seed}>", self.layer.source
        linecache.cache[file] = len(source), None, source.splitlines(keepends=True), file
        exec(compile(source, file, "exec"), names)
        torch.manual_seed(self.seed)
        dtype = getattr(torch, self.layer.dtype)
        return names["MoE"]().to(dtype), names["inputs"]().to(dtype)

    @property
    def reproducer(self) -> str:
        checks = (
            f'if __name__ == "__main__":\n    from tests.corpus.fuzz.run import check\n    torch.manual_seed({self.seed})\n'
            f"    print(check(MoE().to(torch.{self.layer.dtype}), inputs().to(torch.{self.layer.dtype})))\n"
        )
        kind = f"{self.change or 'unchanged'}{', hidden' if self.layer.hidden else ''}"
        return f"# seed {self.seed}: {kind}\n{self.layer.source}\n\n{checks}"


@dataclass
class Outcome:
    """``failure`` is empty, ``wrong``, ``missed`` or ``raised``."""

    status: str
    failure: str = ""
    detail: str = ""


class _Backend:
    """Rewrites as the switch does; runs what was rewritten ``traced`` by AOTAutograd, or as it is."""

    error: Exception | None = None  # of the rewrite

    def __init__(self, *, traced: bool):
        self.traced = traced
        self.records: list[switch.Record] = []

    def __call__(self, gm: fx.GraphModule, example_inputs: list) -> Callable:
        try:
            report = switch.rewrite(gm)
        except switch.NotJustified:
            raise
        except Exception as error:
            self.error = error
            raise
        return aot_eager(gm, example_inputs) if report.rewritten and self.traced else gm.forward

    @property
    def candidates(self) -> list[Candidate]:
        reports = [record.report for record in self.records if isinstance(record, switch.GraphRecord)]
        return [candidate for report in reports for candidate in report.candidates]

    @property
    def rewritten(self) -> list[Candidate]:
        return rewritten_in(self.records)


def case_of(seed: int) -> Case:
    """The program of a seed; changes that eager does not run are drawn again."""
    rng = random.Random(seed)
    layer = draw(rng)
    if rng.random() < HIDDEN:
        hidden = copy.deepcopy(layer)
        hide(hidden, rng)
        layer = hidden if _runs(Case(seed, hidden)) else layer
    layer.calls += rng.random() < AGAIN
    if rng.random() < UNCHANGED:
        return Case(seed, layer)
    for _ in range(20):
        changed = copy.deepcopy(layer)
        change = rng.choice((mutate, mutate, deceive))(changed, rng)
        case = Case(seed, changed, change)
        if change and _runs(case):
            return case
    return Case(seed, layer)


def _runs(case: Case) -> bool:
    try:
        module, x = case.build()
        with torch.no_grad():
            module(x)
    except Exception:
        return False
    return True


def check(module: nn.Module, x: Tensor, *, traced: bool = True) -> Outcome:
    """Compare a module with its rewritten self, with gradients where eager can take them."""
    train = True
    try:
        expected = _run(module, module.__class__.forward, x, train)
    except Exception:
        train = False
        try:
            expected = _run(module, module.__class__.forward, x, train)
        except Exception as error:
            return Outcome("eager fails", detail=repr(error))
    backend = _Backend(traced=traced)
    try:
        with mock.patch.object(config, "strict", True), as_on_a_gpu():
            actual = _compiled(module, x, train, backend)
    except Exception as error:
        return _raised(module, x, train, backend.error or error, in_rewrite=backend.error is not None)
    wrong = _difference(module, x, train, actual, expected)
    if wrong and _difference(module, x, train, _compiled(module, x, train, aot_eager), expected):
        return Outcome("compile differs", detail=wrong)
    if wrong and _reads_unwritten(module, x):
        return Outcome("reads what nobody wrote", detail=wrong)
    if wrong and _ties(module, x):
        return Outcome("tied scores", detail=wrong)
    if wrong and x.dtype.itemsize < 4 and _kinks(module, x) and not check(module.double(), x.double()).failure:
        return Outcome("rounded at a kink", detail=wrong)
    # Of a graph: the second call may have one of its own.
    layers = max((len(rewritten_in([record])) for record in backend.records), default=0)
    if not layers:
        reasons = ", ".join(f"{c.reason} ({c.detail})" for c in backend.candidates)
        return Outcome("declined", "wrong" if wrong else "", wrong or reasons or "no candidate")
    status = f"rewritten{'' if layers == 1 else f' {layers} times'}"
    return Outcome(status, "wrong" if wrong else "", wrong)


def _reads_unwritten(module: nn.Module, x: Tensor) -> bool:
    """True if outputs depend on memory that was never written to."""
    with unwritten_memory_is_nan():
        named = _run(module, module.__class__.forward, x, False)
    return any(not tensor.isfinite().all() for name, tensor in named.items() if name.startswith("output"))


def _ties(module: nn.Module, x: Tensor) -> bool:
    with TopkOfTies() as mode:
        _run(module, module.__class__.forward, x, False)
    return mode.found


def _kinks(module: nn.Module, x: Tensor) -> bool:
    with Kinked() as mode:
        _run(module, module.__class__.forward, x, False)
    return mode.found


def _compiled(module: nn.Module, x: Tensor, train: bool, backend: Callable) -> dict[str, Tensor]:
    torch._dynamo.reset()
    compiled = torch.compile(module.__class__.forward, backend=backend)
    if not isinstance(backend, _Backend):
        return _run(module, compiled, x, train)
    with switch.rewriting(backend), switch.recording() as backend.records:
        return _run(module, compiled, x, train)


def _raised(module: nn.Module, x: Tensor, train: bool, error: Exception, *, in_rewrite: bool) -> Outcome:
    try:
        _compiled(module, x, train, aot_eager)
    except Exception:
        if not in_rewrite:
            return Outcome("compile fails", detail=repr(error)[:200])
    return Outcome("raised", "raised", f"{type(error).__name__}: {error}")


def _run(module: nn.Module, forward: Callable, x: Tensor, train: bool) -> dict[str, Tensor]:
    """What one or two calls give and leave: outputs, their strides, gradients, the input, parameters, buffers, Python's state."""
    module = copy.deepcopy(module)
    grad_mode = torch.is_grad_enabled()
    named: dict[str, Tensor] = {}
    try:
        for call in range(getattr(module, "calls", 1)):
            if call:
                module.eval()
                x = x.flip(-1)
                with torch.no_grad():
                    for parameter in module.parameters():
                        parameter.mul_(-0.75)
            named |= {f"{name}{' again' if call else ''}": t for name, t in _call(module, forward, x, train).items()}
    finally:
        torch.set_grad_enabled(grad_mode)
    return named


def _call(module: nn.Module, forward: Callable, x: Tensor, train: bool) -> dict[str, Tensor]:
    with torch.set_grad_enabled(train):
        x = x.clone().requires_grad_(train)
        out = forward(module, x)
        outs = out if isinstance(out, tuple) else (out,)
        named = {f"output {i}": o.detach().clone() for i, o in enumerate(outs)}
        named |= {f"strides of output {i}": torch.tensor(_strides(o)) for i, o in enumerate(outs)}
        if train:
            named |= _gradients(module, x, outs)
    named |= {"input": x.detach()} | {f"value of {n}": p.detach().clone() for n, p in module.named_parameters()}
    named |= {f"value of {n}": b.clone() for n, b in module.named_buffers()}
    state = getattr(module, "seen", 0), *getattr(module, "log", ())
    return named | {"state of Python": torch.tensor(state)}


def _strides(tensor: Tensor) -> tuple[int, ...]:
    """The strides that tell where elements are."""
    return tuple(stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size > 1 and tensor.numel())


def _gradients(module: nn.Module, x: Tensor, outs: tuple[Tensor, ...]) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    terms = [(o * torch.randn(o.shape, generator=generator).to(o.dtype)).sum() for o in outs if o.requires_grad]
    if not terms:
        return {}
    sum(terms).backward()
    named = {"x": x, **dict(module.named_parameters())}
    return {f"gradient of {n}": p.grad.clone() for n, p in named.items() if p.grad is not None}


def _difference(
    module: nn.Module, x: Tensor, train: bool, actual: dict[str, Tensor], expected: dict[str, Tensor]
) -> str:
    """What differs by more than rounding explains; judged by eager in fp64."""
    absent = {n for n in expected.keys() ^ actual.keys() if _nonzero(expected.get(n)) or _nonzero(actual.get(n))}
    if absent:
        return f"only one has: {sorted(absent)}"
    suspects = [n for n in expected if n in actual and not _close(actual[n], expected[n], NOISE[x.dtype])]
    if not suspects:
        return ""
    wide = x.dtype if x.dtype == torch.float64 else torch.float64
    exact = _run(copy.deepcopy(module).to(wide), module.__class__.forward, x.to(wide), train)
    gradients = (t.double().nan_to_num(0, 0, 0) for n, t in expected.items() if n.startswith("gradient") and t.numel())
    largest = max((gradient.abs().max() for gradient in gradients), default=0.0)
    for name in suspects:
        value, reference = actual[name].double(), expected[name].double()
        if value.shape != reference.shape or actual[name].dtype != expected[name].dtype:
            return f"{name}: {actual[name].dtype}{list(value.shape)} for {expected[name].dtype}{list(reference.shape)}"
        if name.startswith(("strides", "state")):
            return f"{name}: {actual[name].tolist()} for {expected[name].tolist()}"
        if not reference.isfinite().all():
            continue
        # Gradients that cancel (of a single renormalised weight) are as inexact as those they are made of.
        scale = largest if name.startswith("gradient") else reference.abs().max()
        off = (exact[name].double() - reference).abs().max() if name in exact else 0.0
        noise = NOISE[torch.float32] if x.dtype == torch.float64 and "float" in _source_dtypes(module) else NOISE[x.dtype]
        allowed = AMPLIFIED * off + noise * scale + 1e-30
        if not (value - reference).abs().max() <= allowed:
            return f"{name}: off by {(value - reference).abs().max():.3g}, largest {scale:.3g}, allowed {allowed:.3g}"
    return ""


def _source_dtypes(module: nn.Module) -> tuple[str, ...]:
    code = inspect.unwrap(module.__class__.forward).__code__
    return tuple("float" for name in code.co_names if name in ("float32", "float"))


def _nonzero(tensor: Tensor | None) -> bool:
    return tensor is not None and bool(tensor.count_nonzero())


def _close(actual: Tensor, expected: Tensor, noise: float) -> bool:
    if actual.shape != expected.shape or actual.dtype != expected.dtype:
        return False
    if not expected.numel():
        return True
    value, reference = actual.double(), expected.double()
    return bool((value - reference).abs().max() <= noise * reference.abs().max() + 1e-30)


def outcome_of(case: Case) -> Outcome:
    """The properties of one program."""
    module, x = case.build()
    outcome = check(module, x, traced=case.seed % TRACED == 0)
    plain = not case.change and not case.layer.hidden
    if plain and not outcome.failure and outcome.status not in AS_EXPECTED:
        return Outcome(outcome.status, "missed", outcome.detail)
    return outcome


@dataclass(frozen=True)
class Result:
    """What became of one seed. ``seconds`` are of processor time."""

    seed: int
    family: str
    changed: bool
    hidden: bool
    outcome: str
    detail: str
    seconds: float

    @property
    def failed(self) -> bool:
        return self.outcome in FAILURES


FAILURES = ("wrong", "missed", "raised")


def _result_of(seed: int) -> Result:
    start = time.process_time()
    case = case_of(seed)
    outcome = outcome_of(case)
    if outcome.failure:
        print(f"FAILED seed {seed}: {outcome.failure}: {outcome.detail}\n{case.reproducer}", flush=True)
    said = outcome.failure or outcome.status
    seconds = round(time.process_time() - start, 3)
    return Result(seed, case.layer.family, bool(case.change), bool(case.layer.hidden), said, outcome.detail[:500], seconds)


def summary(results: list[Result]) -> dict[str, object]:
    """Counts of outcomes, in all and per family, and the failures."""
    counts = Counter(result.outcome for result in results)
    families = {family: Counter(r.outcome for r in results if r.family == family) for family in {r.family for r in results}}
    return {
        "torch": torch.__version__,
        "seeds": len(results),
        "counts": {name: counts[name] for name in dict.fromkeys(("rewritten", "declined", *FAILURES, *sorted(counts)))},
        "families": {family: dict(sorted(of.items())) for family, of in sorted(families.items())},
        "seconds per seed": round(sum(r.seconds for r in results) / max(1, len(results)), 3),
        "failures": [asdict(result) for result in results if result.failed],
    }


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Fuzz the rewrite of Mixture-of-Experts layers.")
    parser.add_argument("--seeds", default="0:1000", help="FIRST:END, FIRST: or one seed (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop after this time")
    parser.add_argument("--jobs", type=int, default=1, help="processes that share the seeds (default: %(default)s)")
    parser.add_argument("--json", type=Path, help="write the summary to this file")
    parser.add_argument("--show", type=int, help="print the program of this seed and stop")
    options = parser.parse_args(arguments)
    if options.show is not None:
        print(case_of(options.show).reproducer, flush=True)
        return 0
    results: list[Result] = []
    with until_stopped():
        results.extend(results_of(_result_of, options.seeds, options.jobs, options.seconds))
    results.sort(key=lambda result: result.seed)
    total = summary(results)
    if options.json:
        options.json.write_text(json.dumps(total, indent=2) + "\n")
    kinds = Counter((r.family, r.changed, r.hidden, r.outcome) for r in results)
    for (family, changed, hidden, outcome), count in sorted(kinds.items()):
        print(family, "changed" if changed else "unchanged", *(["hidden"] if hidden else []), outcome, count)
    failures = [(result.seed, result.outcome) for result in results if result.failed]
    print(f"{len(results)} seeds, {total['seconds per seed']} s each, {len(failures)} failures: {failures}")
    return bool(failures)


if __name__ == "__main__":
    sys.exit(main())
