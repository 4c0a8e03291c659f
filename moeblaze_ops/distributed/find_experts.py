"""Which parameters of a model belong to experts, read off shapes and the tree of modules alone.

Two forms are known. *Stacked*: a module has parameters ``[E, ...]`` of three axes, two or more. *Listed*: a ``ModuleList``
of E modules with equal parameters, or several such lists beside each other, with at least two parameters of two axes for an
expert. Either is taken if the layer around it has a router: a parameter of two axes, one of them E and the other one an axis of
the experts' weights. A list of decoder layers has none, and is left.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from torch import Tensor, nn

from moeblaze_ops.distributed.whole_weights import has_forward


@dataclass(frozen=True)
class ExpertGroup:
    """Parameters of E experts in one module.

    ``names`` of a stacked group are parameters of ``owner``. Of a listed one ``owner`` is the list, and they are the names of
    each entry's parameters. ``layer`` is the path of the module whose forward runs the experts: it has them and their router.
    """

    owner: str
    names: tuple[str, ...]
    num_experts: int
    listed: bool
    layer: str
    why: str


@dataclass(frozen=True)
class Left:
    """A module that looks like experts and stays as it is."""

    name: str
    why: str


Selection = Callable[[str, Tensor], bool] | Iterable[str] | None


def find_experts(model: nn.Module, selection: Selection) -> tuple[list[ExpertGroup], list[Left]]:
    """The groups of expert parameters of ``model``, by its shapes or by ``selection``, and what was left."""
    if selection is None:
        return _found(model)
    return _selected(model, _named(model, selection)), []


def _found(model: nn.Module) -> tuple[list[ExpertGroup], list[Left]]:
    groups, left = [], []
    for path, module in model.named_modules():
        names, lists = _stacked_names(module), _lists_beside(model, path)
        weights = [module._parameters[name] for name in names] or [p for each in lists for p in _of_two_axes(model, each)]
        if len(weights) < 2:
            continue
        num_experts = weights[0].shape[0] if names else len(module)
        router = _router(model, path, num_experts, weights, lists)
        if router is None:
            if names or (len(weights) <= 3 and max(p.dim() for p in module[0].parameters()) == 2):
                left.append(Left(path, f"no router [{num_experts}, D] in the layer around it"))
            continue
        routed = f"routed by {router}"
        if lists:
            own = tuple(name for name, _ in module[0].named_parameters())
            beside = f" in each of {len(lists)} lists" if len(lists) > 1 else ""
            why = f"{num_experts} modules with equal parameters{beside}, {routed}"
        else:
            own = (*names, *_biases(module, names, router))
            why = f"parameters {' and '.join(str(list(w.shape)) for w in weights)}, {routed}"
        whole = has_forward(module) and (not path or router.startswith(f"{path}."))
        groups.append(ExpertGroup(path, own, num_experts, bool(lists), path if whole else _layer(model, path), why))
    return groups, left


def _stacked_names(module: nn.Module) -> tuple[str, ...]:
    """Parameters of three axes with one first size; () unless they are two or more."""
    shapes = {name: p.shape for name, p in module._parameters.items() if p is not None and p.dim() == 3}
    sizes = {shape[0] for shape in shapes.values()}
    return tuple(shapes) if len(shapes) > 1 and len(sizes) == 1 and max(sizes) > 1 else ()


def _biases(module: nn.Module, names: tuple[str, ...], router: str) -> tuple[str, ...]:
    """Parameters ``[E, C]`` beside stacked weights, but for the router's own."""
    num_experts = module._parameters[names[0]].shape[0]
    widths = {size for name in names for size in module._parameters[name].shape[1:]}
    return tuple(
        name for name, p in module._parameters.items()
        if p is not None and p.dim() == 2 and p.shape[0] == num_experts and p.shape[1] in widths and router.split(".")[-1] != name
    )  # fmt: skip


def _entries_alike(module: nn.Module) -> bool:
    """True if a module is a list of two or more modules of one class whose parameters have equal names and shapes."""
    if not isinstance(module, nn.ModuleList) or len(module) < 2:
        return False
    kinds = {type(entry) for entry in module}
    shapes = {tuple((name, tuple(p.shape), p.dtype) for name, p in entry.named_parameters()) for entry in module}
    return len(kinds) == 1 and len(shapes) == 1 and any(len(shape) == 2 for _, shape, _ in next(iter(shapes)))


def _lists_beside(model: nn.Module, path: str) -> list[str]:
    """The paths of a list of modules alike and of those beside it with as many; [] for another module.

    An expert's weights stand in one list, ``experts``, or in several, ``up`` and ``down``.
    """
    module, around = model.get_submodule(path), path.rpartition(".")[0]
    if not _entries_alike(module):
        return []
    if not path:
        return [path]
    beside = model.get_submodule(around).named_children()
    return [f"{around}.{n}" if around else n for n, m in beside if _entries_alike(m) and len(m) == len(module)]


def _of_two_axes(model: nn.Module, path: str) -> list[Tensor]:
    return [p for p in model.get_submodule(path)[0].parameters() if p.dim() == 2]


def _router(model: nn.Module, path: str, num_experts: int, weights: list[Tensor], lists: list[str]) -> str | None:
    """The path of a parameter ``[E, D]`` or ``[D, E]`` that is no expert's, in the module or the two around it that compute.

    One of another module than the experts' own goes first: beside stacked weights it may be a bias.
    """
    widths = {size for weight in weights for size in weight.shape[-2:]}
    shapes = {(num_experts, width) for width in widths} | {(width, num_experts) for width in widths}
    own = None
    for around in _around(model, path):
        for name, p in model.get_submodule(around).named_parameters(prefix=around):
            if tuple(p.shape) in shapes and not _is_expert_weight(name, p, weights, lists):
                if name.rpartition(".")[0] != path:
                    return name
                own = own or name
    return own


def _is_expert_weight(name: str, parameter: Tensor, weights: list[Tensor], lists: list[str]) -> bool:
    inside = any(not path or name.startswith(f"{path}.") for path in lists)
    return inside or any(parameter is weight for weight in weights)


def _around(model: nn.Module, path: str) -> Iterator[str]:
    """The path itself and those of the next two modules around it that compute something."""
    yield path
    parts, found = path.split(".") if path else [], 0
    while parts and found < 2:
        parts.pop()
        around = ".".join(parts)
        if has_forward(model.get_submodule(around)):
            found += 1
            yield around


def _layer(model: nn.Module, path: str) -> str:
    """The path of the module around ``path`` whose forward runs the experts; ``path`` itself at the root."""
    return next((around for around in _around(model, path) if around != path), path)


def _named(model: nn.Module, selection: Callable | Iterable[str]) -> set[str]:
    parameters = dict(model.named_parameters())
    if callable(selection):
        return {name for name, p in parameters.items() if selection(name, p)}
    inside = {each: {name for name in parameters if name == each or name.startswith(f"{each}.")} for each in selection}
    if unknown := sorted(each for each, names in inside.items() if not names):
        raise ValueError(f"shard_experts: parameters must be names of the model's parameters or modules, got {unknown[0]!r}")
    return set().union(*inside.values())


def _selected(model: nn.Module, names: set[str]) -> list[ExpertGroup]:
    """The groups of the parameters that the caller named: lists of which every entry is named whole, and single parameters."""
    groups: list[ExpertGroup] = []
    taken: set[str] = set()
    for path, module in model.named_modules():
        if not _entries_alike(module):
            continue
        inside = {f"{path}.{name}" if path else name for name, _ in module.named_parameters()}
        if inside <= names and not inside & taken:
            own = tuple(name for name, _ in module[0].named_parameters())
            groups.append(ExpertGroup(path, own, len(module), True, _layer(model, path), "named by the caller"))
            taken |= inside
    owners: dict[str, list[str]] = {}
    for name in sorted(names - taken):
        path, _, last = name.rpartition(".")
        owners.setdefault(path, []).append(last)
    for owner, chosen in owners.items():
        sizes = [model.get_submodule(owner)._parameters[name].shape for name in chosen]
        if not all(sizes):
            raise ValueError(f"shard_experts: parameters must have an axis of experts, got a scalar in {owner!r}")
        num_experts = min(shape[0] for shape in sizes)
        groups.append(ExpertGroup(owner, tuple(chosen), num_experts, False, _layer(model, owner), "named by the caller"))
    return groups
