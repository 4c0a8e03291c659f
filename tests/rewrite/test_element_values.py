"""An operator's form says what the operator gives: each element's formula is computed and compared.

A line that fails says that a form takes an operator for another one, as where it does not look at a keyword.
"""

import pytest
import torch
import torch.nn.functional as F

from tests.corpus.element_values import wrong_elements

T, E, K = 5, 4, 2

CALLS = """
torch.max(m, m2)    m.max(m2)    m.max()    m.int().max()    ids.max(1)    scores.argmax(1)
torch.logical_and(ids, ids.flip(0))    torch.logical_and(x, y)    torch.logical_not(ids)    x.logical_not().logical_not()
torch.logical_or(ids, m)    ~m    m & m2    m | m2    m * m2    m == m2    m != m2    m == 1    m < m2    m > 0    1 - m.int()
(F.one_hot(chosen, E) * F.one_hot(chosen, E).cumsum(0) - 1).max(1).values    (F.one_hot(ids, E) * F.one_hot(ids, E)).amax(1)
(F.one_hot(chosen, E) * ids[..., None]).amax(1)    (F.one_hot(ids, E) * ids[..., None]).max(2, keepdim=True)[0]    ids.amax(0)
(-F.one_hot(chosen, E)).amax(1)    (F.one_hot(chosen, E) * (ids[..., None] - 2)).amax(1)    (2 * F.one_hot(chosen, E)).amax(1)
m.sum(dtype=torch.bool)    m.sum(-1, dtype=torch.bool)    m.sum((0, 1))    m.sum(0, True)    x.sum(axis=0)    x.sum(())
m.any(dim=(0, 1))    m.all(0, keepdim=True)    ids.any()    torch.count_nonzero(ids, dim=1)    m.cumsum(0)    x.cumsum(1)
torch.zeros(T, E, dtype=torch.bool).scatter_add(1, ids, torch.ones_like(m))
torch.zeros(E, dtype=torch.bool).index_add(0, ids.flatten(), torch.ones(T * K, dtype=torch.bool))
torch.zeros(T, E, dtype=torch.uint8).scatter_add(1, ids, torch.full_like(ids, 200, dtype=torch.uint8))
ids.new_zeros(E).scatter_add(0, ids.flatten(), ids.new_ones(T * K))    ids.new_ones(E).scatter_add(0, ids[:, 0], ids.new_ones(T))
ids.new_zeros(E).scatter_add(0, ids[:, 0], torch.full((T,), 2))    ids.new_zeros(E).scatter(0, ids.flatten(), ids.new_ones(T * K))
torch.zeros(1, dtype=torch.bfloat16).scatter_add(0, ids.new_zeros(600), torch.ones(600, dtype=torch.bfloat16))
ids.new_zeros(E).scatter_add(0, ids.flatten(), ids.flatten())    ids.new_zeros(T, E).scatter_add(1, ids, ids.new_ones(T, K))
torch.zeros(E, dtype=torch.bool).scatter_add(0, ids.flatten(), torch.ones(T * K, dtype=torch.bool))
torch.zeros(E, dtype=torch.uint8).scatter_add(0, ids.flatten().repeat(100), torch.ones(100 * T * K, dtype=torch.uint8))
torch.zeros(T, E).scatter_add(1, ids, torch.ones(T, K))    torch.zeros(T, E).scatter_reduce(1, ids, torch.ones(T, K), "sum")
torch.zeros(T, E).double().scatter(1, chosen, x[:, :K])    torch.ones(T, E).scatter_reduce(1, ids, torch.ones(T, K), "amax")
torch.zeros_like(x).index_add(0, ids[:, 0], x, alpha=2)    torch.ones_like(x).index_copy(0, torch.tensor([3, 1]), y[:2])
torch.zeros(T, E).double().index_put((torch.arange(T)[:, None], chosen), x[:, :K], accumulate=True)
F.pad(x, (1, 2))    F.pad(ids, (0, 0, 2, 1), value=3)    F.pad(m, (1, 0), value=True)    F.pad(x[None], (1, 1), mode="reflect")
F.pad(x, (-1, 2))    F.pad(ids.flatten().bincount(minlength=E).cumsum(0), (1, 0))    F.pad(x, (0, 1, 1, 0), "constant", 0.5)
x.clamp(0.5, -0.5)    torch.clamp_max(x, 0.2)    x.clamp_min(0.2)    F.hardtanh(x, max_val=0.3)    F.glu(x)
F.leaky_relu(x, 0.3)    F.hardshrink(x, 0.3)    F.softshrink(x, lambd=0.3)    F.tanhshrink(x)    F.rrelu(x)
torch.lerp(x, y, 0.3)
torch.lerp(x, y, weight=y)    torch.rsub(x, y, alpha=2)    torch.addcdiv(x, y, x, value=2)    torch.min(x, y)    x.max(y)
x.min()
torch.clamp(x, max=y)    torch.clamp_min(x, y)    2**x    torch.exp2(x)    torch.log2(x.abs())    torch.logaddexp(x, y)    +x
ids ^ 1    m ^ m2    torch.logical_xor(ids, ids.flip(0))    (ids ^ 1) == 0    ids - 1 == 0    2 * ids == 3    (ids - 1).abs() == 0
(ids >= 1) & (ids < 2)    ~((ids < 1) | (ids > 1))    (ids > 1) & ~(ids > 2)    ids.to(torch.uint8) == 258    ids.int() < 2**31
F.elu(x, 2.0)    F.softplus(x, 2, 1)    F.threshold(x, 0.1, 20.0)    F.prelu(x, torch.tensor([0.3]).double())
torch.rsub(x, y)    torch.sub(x, y, alpha=2)    torch.addcmul(x, y, y, value=2)    torch.addmm(x[:, :5], x, y.T, alpha=2)
x ** -1
ids // 2    -ids // 2    -ids % 3    (ids - 3) % 2    torch.div(ids - 2, 2, rounding_mode="trunc")    x // 0.3    ids / 2
ids.int() * 2**30 * 4    ids * 2**62 * 4    ids.to(torch.int8) * 100    (ids + 127).to(torch.int8).long()    (-ids).bool()
F.pad(m.double(), (0, 0, 1, 0)).cumsum(0)    F.pad(m.double(), (0, 0, 1, 0)).cumsum(0)[:-1]
F.pad(m.flatten().repeat(40).bfloat16(), (1, 0)).cumsum(0)[:-1].long()
F.pad(m.long(), (0, 0, 2, 0)).cumsum(0)    F.pad(m.long(), (0, 0, 1, 0), value=1).cumsum(0)    F.pad(m.double(), (1, 1)).cumsum(1)
F.pad(m.cumsum(0), (0, 0, 1, 0))    F.pad(m.cumsum(0), (0, 0, 2, 1))    F.pad(m.cumsum(0), (0, 0, 1, 0), value=1)
F.pad(m.double().cumsum(1), (1, 0))    F.pad(m.cumsum(1), (0, 0, 1, 0))    F.pad(m.cumsum(0), (1, 0, 1, 0))
F.pad(x.cumsum(0), (0, 0, 1, 0))
F.pad(x, (1, 0)).cumsum(1)[:, :-1]    F.pad(m[:1].long(), (0, 0, 1, 0)).cumsum(0)
F.pad(m.long(), (1, 0)).cumsum(0)    F.pad(m.long(), (1, 0))[:, :-1].cumsum(1)
(m.double().cumsum(0) - m.double()).long()    m.double().cumsum(0) * 2 - 1 + m2    1 - m.double().cumsum(0) / 2
(m.double().cumsum(0) * 0.5).long()    (m.double().cumsum(0) - 3) // 2    m.sum(0) * m2.cumsum(0) - m.double()
(m * ((m.double().cumsum(0) - m.double()) * m < 2)).sum(0)    (m * (m2 * m < 1)).sum(0)    (m * (m.sum(1, True) < 2)).sum(0)
(m * (m * x[:, :2] * 1e4).exp()).sum(0)    (m.cumsum(0) * (m.cumsum(0) < 2)).sum(0)
(F.one_hot(ids[:, 0], E).cumsum(0) - 1).gather(1, ids[:, :1]).clamp(min=0)    (F.one_hot(ids[:, 0], E).cumsum(0) - 1).clamp(min=0)
(F.one_hot(ids[:, 0], E).cumsum(0) - 1).gather(1, ids[:, :1]).clamp(min=1)    F.one_hot(ids, E).sum((0, 1)).clamp(max=9) <= 9
(m.flatten().bfloat16().cumsum(0) * 60 + m.flatten()).long()    (m.bfloat16().cumsum(0) + 255).long()    m.bfloat16().sum(0) * -60
(m.flatten().bfloat16().cumsum(0) * (m.flatten().bfloat16().cumsum(0) * 25)).long()    (ids * 2**20).int() * (ids * 2**20).int()
(m.double() * -1) > 0    (m.double() * 0.3).long()    (m.long() - m2.long()).bool()    (ids == 1).sum(1) > 1
(ids == 1).sum(1) == 1
torch.where(m, x[:, :2], y[:, :2])    torch.where(m, 0, m * y[:, :2])    torch.where(m, x[:, :2] * 2, x[:, :2] * m2)
scores.softmax(-1) > 0.3    (scores.softmax(-1) - 0.5) > 0    (scores - 0.5).relu() > 0    (scores.softmax(-1) * -1) != 0
torch.isin(ids, torch.tensor([1, 3]))    torch.isin(ids, 2, invert=True)    F.one_hot(ids, E).cumsum(0)
torch.eye(E)[ids].sum(1)
torch.bincount(ids.flatten(), minlength=E)    torch.histc(ids.double(), bins=E, min=0, max=E)    torch.histc(ids.double(), E)
ids.flatten().sort(stable=True)    ids.flatten().argsort(stable=True).argsort()    ids.flatten().argsort(descending=True)
m.nonzero()    m.T.nonzero()    torch.where(m)    x[m.any(1)]    x[:, :2][m]    torch.unique(ids)
m.flatten().nonzero().flatten() // K
(chosen[(chosen == 1).any(1)] == 1).nonzero()    (ids // 3)[(ids // 3 == 0).any(1)].eq(0).nonzero()
(chosen[(chosen == 1).any(1)] == 2).nonzero()    (chosen[m.any(1)] == 1).nonzero()
x[[1, 0, 3]]    x[1:4:2]    x[:, -3:]    x[..., 1]    x[ids]    x[ids, ids]    x[:, ids]    x.take_along_dim(ids, 1)
x.gather(0, ids)
x.repeat(2, 3)    x.tile(2)    x.repeat_interleave(2)    x.repeat_interleave(2, 0)    x.flip(0)    x.tensor_split([2, 1])
x.repeat_interleave(F.one_hot(ids[:, 0], T).sum(0), 0)    x.repeat_interleave(ids[:, 0], 0)    x.repeat_interleave(2, -1)
x.repeat_interleave(m.sum()[None], 0)    x[:, :E].repeat_interleave(F.one_hot(ids, E).sum((0, 1)), -1)
x.chunk(4)    x.repeat(repeats=[2, 1, 1])    torch.tile(x, dims=(2, 1))
x.unflatten(1, (2, 3)).movedim(0, -1)    torch.stack([x, y], -1)    torch.cat([x, y[:2]])    torch.cat([x[:, :1], y[:, :1]], 1)
torch.arange(9, 3, -2)    torch.arange(1, end=5)    torch.full((2,), 1.5, dtype=torch.long)    (torch.arange(12) * 3 - 1) // 3
torch.einsum("td,sd->ts", x, y)    torch.einsum("ba,cb", x, x[:, :5])    torch.einsum(x, [0, 1], y, [2, 1], [0, 2])    x @ y[0]
torch.tensordot(x, y, dims=([1], [1]))    F.linear(x, y, x[:, 0])    F.linear(x, y[0])
torch.baddbmm(x[None], x[None, :, :5], y[None])
"""


@pytest.mark.parametrize("line", CALLS.strip().splitlines())
def test_formulas_are_what_operators_give(line):
    torch.manual_seed(0)
    x, y = (torch.randn(T, 6, dtype=torch.float64) for _ in range(2))
    scores, ids = torch.rand(T, E, dtype=torch.float64), torch.randint(0, E, (T, K))
    for call in line.split("    "):
        for made in ("ids == 1", "(ids + 0).bool()"):
            flags = f"m, m2, chosen = {made}, ids >= 2, scores.topk(K, -1).indices"
            source = f"def run(x, y, scores, ids):\n    {flags}\n    return {call}"
            names = {"torch": torch, "F": F, "T": T, "E": E, "K": K}
            exec(source, names)
            assert not list(wrong_elements(names["run"], x, y, scores, ids)), call


PLACES = (
    "e = ids.flatten() % 4; c = F.one_hot(e, 4); at = ((c.cumsum(0) - 1) * c).sum(-1); kept = at < 2; m = kept[:, None]; "
    "rows = x[torch.arange(10) // 2]; "
    "put = lambda p, rows, C=2: x.new_zeros(4, C, 6).index_put((e, p), rows, accumulate=True); "
)
"""Rows at their places."""
TURNED = PLACES.replace("one_hot(e", "one_hot(e.view(5, 2).t().flatten()").replace("sum(-1)", "sum(-1).view(2, 5).t().flatten()")
"""These are counted first slots first."""
WRITES = """
out = x.clone(); rows = out[1:3]; rows += 1; out[0] = y[0]; return out, rows
out = x.clone(); out.T[2].mul_(3); out[:, 1].zero_(); return out.view(-1), out
out = torch.zeros_like(x); out[:, 2] = x[:, 2]; out[2:4] += y[2:4]; return out * 2
out = x.clone(); out[1:3] = y[0]; out[:, 4:] = 2; out[..., -1:] = y[:, :1]; return out, out[2]
out = torch.zeros(5, dtype=torch.long); out[1:] = ids[:4, 0].cumsum(0); out[-1:] = x[:1, 0]; out[::2] = 7; return out, out * 2
out = x.clone(); out[:] = y[:1]; out[2:2] = 1; out[-9:2, 1:3] = y[0, 0]; return out, out[0]
out = x.clone(); out[1] += y[0]; out[2].mul_(3); out[:, 1] -= 1; return out, out[1]
out = torch.zeros_like(x); row = out[0]; row += 1; out[1] += y[2]; out[0] += x[0]; return out, row, out.T
c = torch.zeros(5, dtype=torch.long); c[1] += ids.sum(); c[-1] += 2; p = c[3:4]; p += 1; c[3] += 1; return c, p
out = x.clone(); a, b = out[1:4], out[2:5]; a += 1; b *= y[:3]; return out, a, b
out = x.clone(); part = out[:, 1:5]; part.mul_(2); part[:, 1:] = y[:, :3]; part[0] = 5; return out, part
out = x.clone(); a, b = out.narrow(1, 1, 2), out.narrow(1, 3, 2); a.add_(y[:, :2]); b.zero_(); return out, a, b
out = x.clone(); out[2, 1:3] = y[0, :2]; out[1:4, 0] = y[:3, 1]; out[[0, 3]] = y[:2]; return out, out[2]
out = torch.stack([x, y]); out[1, :, 2:4] = 1; out[:, 1:3, 0] += x[:2, :2]; out[0, 1:, [1, 2]] = y[1:, :2]; return out
out = x.clone(); out[None] = y; out[:, None, 2] = x[:, :1]; out[::2] += 1; out[1:4:2] = 3; return out
row = torch.zeros(6).double(); out = row.expand(3, 6); part = out[1:]; part[0] = y[0]; return out * 1, row
row = torch.zeros(6).double(); out = row.expand(3, 6); out[1] += y[0]; return out * 1, row
flat = x.reshape(-1).clone(); out = flat.unfold(0, 6, 3); out[1] += y[0]; return out * 1, flat
row = torch.zeros(6).double(); out = row.expand(3, 6); out[1] = y[0]; out[2, 3] = 5; return out * 1, row
row = torch.zeros(6).double(); out = row.expand(3, 6); out[1:2] = y[0]; return out * 1, row
flat = x.reshape(-1).clone(); out = flat.unfold(0, 6, 3); out[1] = y[0]; return out * 1, flat
out = x.clone().t(); out[1] += y[0, :1]; part = out[2]; part += 1; return out, part
out = x.clone(); flat = out.view(-1); flat[3:9] = 2; out.unsqueeze(0).add_(y); return flat, out
m = ids[:, 0] == 1; out = torch.stack([x, y]); out[1, m] = x[m]; out[ids[:2, 0] // 9, 0] = 1; return out, out[1, m]
m = ids[:, 0] == 1; out = torch.stack([x, y]) * m[:, None]; rows = out[0, m]; out[0, m] = y[m]; return out, rows
m = ids > 1; t, k = m.nonzero(as_tuple=True); return m[t.flip(0), k], m[t, k]
m = ids > 1; out = x.new_zeros(5, 2, 2); out[m, 0] = y[:, :2][m]; return out
{places} p = torch.where(kept, at, 0); b = put(p, rows * m); return b[e, p] * m, b
{places} p = at * kept; b = put(p, rows * m); return b[e, p] * 2 * m, b[e, p]
{places} p = at.clamp(max=1); b = put(p, rows * m); return b[e, p] * m, b[e, 1 - p]
{places} p = at.clamp(0, 1); b = put(p, rows * m); return b[e, p] * m, b[e, p * 0]
{places} p = at.clamp(1, 2); b = put(p, rows * m, 3); return b[e, p] * m, b[e, p] * (at < 3)[:, None]
{places} p = (at - 1).clamp(0, 1); m = (at - 1 < 2)[:, None]; b = put(p, rows * m); return b[e, p] * m, b[e, p]
{places} p = at.clamp(max=1); m = (at <= 2)[:, None]; return put(p, rows * m)[e, p] * m
{places} p = at.clamp(max=2); b = put(p, rows * m, 3); return b[e, p] * m, b[e, p] * (at < 3)[:, None]
{places} p = (at // 2).clamp(max=1); return put(p, rows * m)[e, p] * m
{places} p = torch.where(kept, at, 0); return put(p, rows)[e, p] * m
{turned} b = put(at, rows, 9); return b[e, at], b
s = x[:, 0] * 3; c = s.clamp(max=1) == s; return c * (s < 2), (s < 2) * (torch.where(s < 2, s, 0) == s.clamp(max=1))
flags = ids == 1; flags[0] = True; hits = x.clone(); hits[flags.any(1)] *= 2; return flags, hits
"""


@pytest.mark.parametrize("line", WRITES.strip().splitlines())
def test_formulas_are_what_is_left_after_writes(line):
    torch.manual_seed(0)
    names = {"torch": torch, "F": F}
    exec(f"def run(x, y, ids):\n    {line.format(places=PLACES, turned=TURNED)}", names)
    x, y = (torch.randn(T, 6, dtype=torch.float64) for _ in range(2))
    assert not list(wrong_elements(names["run"], x, y, torch.randint(0, E, (T, K))))
