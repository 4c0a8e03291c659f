"""Layers whose experts are tensors of their own, and training steps through the rewrite that keep the graphs."""

import torch
import torch.nn.functional as F
from functorch.compile import make_boxed_func
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.partitioners import min_cut_rematerialization_partition

from moeblaze_ops.lowering.rewrite.rewrite import rewrite_graph

D, H, E, K, T = 16, 24, 4, 2, 40


class Experts(nn.Module):
    """Masked experts that read ``weight(name, e)``."""

    def __init__(self, storage="linear", bias=False):
        super().__init__()
        self.router = nn.Linear(D, E, bias=False)
        self.storage, self.bias = storage, bias
        self.make({"gate": (H, D), "up": (H, D), "down": (D, H)} if storage != "packed" else {"up": (2 * H, D), "down": (D, H)})

    def linear(self, name, e, x):
        weight, bias = self.weight(name, e), self.weight(f"{name}_bias", e) if self.bias else None
        if self.storage == "transposed":
            return x @ weight if bias is None else x @ weight + bias
        return F.linear(x, weight, bias)

    def expert(self, e, x):
        if self.storage == "packed":
            gate, up = self.linear("up", e, x).chunk(2, dim=-1)
        else:
            gate, up = self.linear("gate", e, x), self.linear("up", e, x)
        return self.linear("down", e, F.silu(gate) * up)

    def forward(self, x):
        weights, ids = self.router(x).softmax(-1).topk(K, dim=-1)
        out = torch.zeros_like(x)
        for e in range(E):
            out = out + self.expert(e, x) * (weights * (ids == e)).sum(-1, keepdim=True)
        return out

    def make(self, shapes):
        for name, (outputs, inputs) in shapes.items():
            shape = (inputs, outputs) if self.storage == "transposed" else (outputs, inputs)
            self.add(name, torch.randn(E, *shape) / inputs**0.5)
            if self.bias:
                self.add(f"{name}_bias", torch.randn(E, outputs))


class Apart(Experts):
    def add(self, name, values):
        setattr(self, name, nn.ParameterList(nn.Parameter(value.clone()) for value in values))

    def weight(self, name, e):
        return getattr(self, name)[e]


class Stacked(Experts):
    def add(self, name, values):
        setattr(self, name, nn.Parameter(values))

    def weight(self, name, e):
        return getattr(self, name)[e]


def stacked_twin(apart):
    twin = Stacked(apart.storage, apart.bias).to(apart.router.weight.dtype)
    twin.router.load_state_dict(apart.router.state_dict())
    with torch.no_grad():
        for name, parameter in twin.named_parameters():
            if "router" not in name:
                parameter.copy_(torch.stack(list(getattr(apart, name))))
    return twin


class SwiGLU(nn.Module):
    def __init__(self, hidden=H):
        super().__init__()
        self.gate, self.up = nn.Linear(D, hidden), nn.Linear(D, hidden)
        self.down = nn.Linear(hidden, D)

    def forward(self, x):
        return self.down(F.silu(self.gate(x)) * self.up(x))


class ModuleListMoE(nn.Module):
    def __init__(self, num_experts=E):
        super().__init__()
        self.router = nn.Linear(D, num_experts, bias=False)
        self.experts = nn.ModuleList(SwiGLU() for _ in range(num_experts))

    def forward(self, x):
        weights, ids = self.router(x).softmax(-1).topk(K, dim=-1)
        out = torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            out = out + expert(x) * (weights * (ids == e)).sum(-1, keepdim=True)
        return out


class Graphs:
    """AOTAutograd with the partitioner of Inductor, after the rewrite; keeps the graphs."""

    def __init__(self):
        self.forward = self.backward = None

    def __call__(self, gm, inputs):
        assert [candidate.reason for candidate in rewrite_graph(gm).candidates] == [None]
        return aot_autograd(
            fw_compiler=self._keep("forward"),
            bw_compiler=self._keep("backward"),
            partition_fn=min_cut_rematerialization_partition,
        )(gm, inputs)

    def _keep(self, name):
        def compile_graph(gm, inputs):
            setattr(self, name, gm.graph)
            return make_boxed_func(gm.forward)

        return compile_graph

    def kept(self):
        """Shapes and dtypes of what forward leaves for backward in memory of its own."""
        (outputs,) = (node.args[0] for node in self.forward.nodes if node.op == "output")
        values = [node.meta["val"] for node in outputs[1:] if isinstance(node, torch.fx.Node)]
        given = {_storage(node.meta["val"]) for node in self.forward.nodes if node.op == "placeholder"}
        return sorted((tuple(value.shape), str(value.dtype)) for value in values if _storage(value) not in given)


def _storage(tensor):
    return tensor.untyped_storage()._cdata


def compiled(layer):
    torch._dynamo.reset()
    graphs = Graphs()
    return torch.compile(layer, backend=graphs, fullgraph=True), graphs


def train(run, x):
    run(x).square().sum().backward()


def optimize(layer, step, x):
    """Three steps of an optimizer."""
    optimizer = torch.optim.AdamW(layer.parameters(), lr=0.01)
    for _ in range(3):
        optimizer.zero_grad()
        train(step, x)
        optimizer.step()
