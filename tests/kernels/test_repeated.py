"""Launches that are made again go to where the arguments are now. No device: a driver that lists what reaches it."""

import types
import weakref

import pytest
import torch

pytest.importorskip("moeblaze_ops.kernels.hopper.gluon_api", exc_type=ImportError)

from moeblaze_ops import config
from moeblaze_ops.kernels import launch, repeated
from moeblaze_ops.kernels.hopper import launch as hopper_launch
from moeblaze_ops.kernels.multiprocessors import leaving_free

DEVICE = torch.device("cpu")


class Reached:
    """The driver's own launcher: what is not a Python function."""

    def __init__(self):
        self.calls = []

    def __call__(self, *args):
        self.calls.append(args)


class Described:
    def __init__(self, base, *box):
        self.base, self.box = base, box


class Compiled:
    """A compiled kernel as Triton 3.6 has it: descriptors are taken apart around the driver's launcher."""

    function = "function"

    def __init__(self, launcher):
        def inner(*args):
            maps = (make_map(arg.base.data_ptr(), *arg.box) if isinstance(arg, Described) else arg for arg in args)
            return launcher(*maps)

        self.run = types.SimpleNamespace(launch=inner)

    def __getitem__(self, grid):
        return lambda *args: self.run.launch(*grid, STREAM, self.function, *args)


STREAM = 11


def make_map(address, *box):
    return repeated.driver.active.utils.fill_tma_descriptor(address, *box)


class Kernel:
    params = ()

    def __init__(self):
        self.reached = Reached()
        self.made = []

    def __getitem__(self, grid):
        def compile_and_run(*args, **options):
            compiled = Compiled(self.reached)
            self.made.append(compiled)
            compiled[(*grid, 1, 1)](*args)
            return compiled

        return compile_and_run


LAUNCHES = {
    "portable": lambda kernel, programs, args: launch.launch_compiled(kernel, programs, args, {"num_warps": 4}),
    "hopper": lambda kernel, programs, args: hopper_launch.launch_compiled(kernel, programs, DEVICE, args, num_warps=4),
}


@pytest.fixture(autouse=True, params=LAUNCHES)
def launched(request, monkeypatch):
    """How a kernel is launched, on a device that there is not."""
    utils = types.SimpleNamespace(fill_tma_descriptor=lambda address, *box: ("map", address, box))
    monkeypatch.setattr(repeated, "driver", types.SimpleNamespace(active=types.SimpleNamespace(utils=utils)))
    monkeypatch.setattr(repeated, "_run", lambda again, addresses, device: again(addresses, STREAM))
    monkeypatch.setattr(repeated, "bind_context", lambda: None)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    for module, specialization in (launch, "specialization"), (hopper_launch, "_specialization"):
        monkeypatch.setattr(module, "_compiled_kernels", {})
        monkeypatch.setattr(module, specialization, lambda argument: None)
    return LAUNCHES[request.param]


def op_of(launched, kernel, body=None, results=lambda body_args: None):
    """An op, and how often it was run in full."""
    full = []

    @repeated.Repeated
    def op(x, given, count=1):
        full.append(x.shape)
        body_args = body(x, given) if body else (x, given[0][1:], (x, 3), Described(given[0], 64, 32), None)
        launched(kernel, 7 * count, body_args)
        return results(body_args)

    return op, full


def tensors():
    return torch.randn(8, 4), [torch.randn(5, 4)]


def address(argument):
    return argument.data_ptr() if isinstance(argument, torch.Tensor) else argument


def test_the_third_call_repeats_at_its_own_addresses(launched):
    kernel = Kernel()
    op, full = op_of(launched, kernel)
    given = [tensors() for _ in range(4)]
    for x, others in given:
        op(x, others)
    assert len(full) == 2 and len(kernel.made) == 1
    for (x, (other,)), reached in zip(given, kernel.reached.calls, strict=True):
        assert reached[:5] == (7, 1, 1, STREAM, "function")
        first, second, (third, number), described, none = reached[5:]
        assert list(map(address, (first, second, third))) == [x.data_ptr(), other.data_ptr() + 16, x.data_ptr()]
        assert (number, described, none) == (3, ("map", other.data_ptr(), (64, 32)), None)


def test_temporaries_are_made_anew(launched):
    kernel = Kernel()
    op, full = op_of(launched, kernel, lambda x, given: (x, torch.empty_like(x)))
    for x, others in [tensors() for _ in range(3)]:
        op(x, others)
    assert len(full) == 2 and isinstance(kernel.reached.calls[2][6], int)


def test_results_are_new(launched):
    kernel = Kernel()
    op, full = op_of(
        launched, kernel, lambda x, given: (x, torch.empty_like(x), x.new_zeros(0)), lambda args: (args[1], [args[2], None])
    )
    given = [tensors() for _ in range(4)]
    results = [op(x, others) for x, others in given]
    assert len(full) == 2
    for (out, (empty, none)), reached in zip(results, kernel.reached.calls, strict=True):
        assert out.shape == (8, 4) and empty.shape == (0,) and none is None
        assert address(reached[6]) == out.data_ptr()
    assert len({out.data_ptr() for out, _ in results}) == 4


def test_temporaries_end_behind_the_launch_that_takes_them_last(launched):
    kernel = Kernel()
    living = []

    @repeated.Repeated
    def op(x):
        first, second = torch.empty_like(x), torch.empty_like(x)
        launched(kernel, 7, (x, first))
        del first
        third = torch.empty_like(x)
        launched(kernel, 7, (second, third))
        return third

    for _ in range(2):
        op(torch.randn(8))
    made = repeated._maker(torch.empty(8))
    x = torch.randn(8)
    (noted,) = [value for values in op._calls._calls.values() for *_, value in values]
    names = noted.again.__globals__

    def kept(make):
        def run():
            tensor = make()
            living.append(weakref.ref(tensor))
            return tensor

        return run

    counts = []
    for name, value in list(names.items()):
        if isinstance(value, type(made)):
            names[name] = kept(value)
        elif value is kernel.reached:
            names[name] = lambda *args: counts.append(sum(ref() is not None for ref in living))
    result = op(x)
    assert counts == [1, 2] and [ref() is not None for ref in living] == [False, False, True]
    assert living[2]() is result


def test_nothing_keeps_tensors_alive(launched):
    kernel = Kernel()
    op, _ = op_of(launched, kernel, lambda x, given: (x, torch.empty_like(x)), lambda args: args[1])
    kept = []
    for _ in range(3):
        x, others = tensors()
        kept += [weakref.ref(x), weakref.ref(others[0]), weakref.ref(op(x, others))]
        del x, others
        kernel.reached.calls.clear()
    assert not [ref for ref in kept if ref() is not None]


def test_an_op_within_one_that_is_noted_is_run_in_full(launched):
    kernel = Kernel()
    inner, full = op_of(launched, kernel)
    outer_full = []

    @repeated.Repeated
    def outer(x, given):
        outer_full.append(x.shape)
        inner(x, given)

    given = [tensors() for _ in range(5)]
    for x, others in given:
        outer(x, others)
    assert len(outer_full) == 2 == len(full)
    assert [address(reached[5]) for reached in kernel.reached.calls] == [x.data_ptr() for x, _ in given]


OTHERS = {
    "shape": lambda x, y: ((torch.randn(9, 4), [y]), {}),
    "strides": lambda x, y: ((torch.randn(4, 8).t(), [y]), {}),
    "dtype": lambda x, y: ((x.double(), [y]), {}),
    "alignment": lambda x, y: ((torch.randn(33)[1:].view(8, 4), [y]), {}),
    "one tensor twice": lambda x, y: ((y, [y]), {}),
    "a number": lambda x, y: ((x, [y], 2), {}),
}


@pytest.mark.parametrize("other", OTHERS.values(), ids=OTHERS)
def test_another_geometry_is_launched_in_full(launched, other):
    kernel = Kernel()
    op, full = op_of(launched, kernel)
    x, y = torch.randn(8, 4), torch.randn(8, 4)
    for _ in range(3):
        op(x, [y])
    assert len(full) == 2
    args, keywords = other(x, y)
    op(*args, **keywords)
    assert len(full) == 3


def test_multiprocessors_left_to_others_are_launched_in_full(launched):
    op, full = op_of(launched, Kernel())
    x, others = tensors()
    for _ in range(3):
        op(x, others)
    with leaving_free(16):
        op(x, others)
    assert len(full) == 3


@pytest.mark.parametrize("knob", ["hopper", "max_transient_bytes", "check_expert_ids"])
def test_settings_that_launchers_read_are_launched_in_full(launched, knob, monkeypatch):
    op, full = op_of(launched, Kernel())
    x, others = tensors()
    for _ in range(3):
        op(x, others)
    monkeypatch.setattr(config, knob, {"hopper": "off", "max_transient_bytes": 1 << 20, "check_expert_ids": True}[knob])
    op(x, others)
    assert len(full) == 3


def test_views_are_clear(launched):
    kernel = Kernel()
    op, full = op_of(
        launched, kernel, lambda x, given: (x.narrow(0, 2, 4), x.unflatten(0, (2, 4)), x.movedim(0, 1), x.reshape(-1))
    )
    for x, others in [tensors() for _ in range(3)]:
        op(x, others)
    assert len(full) == 2
    assert [at - x.data_ptr() for at in kernel.reached.calls[2][5:]] == [2 * x.stride(0) * x.element_size(), 0, 0, 0]


def test_one_tensor_at_two_places(launched):
    kernel = Kernel()
    op, full = op_of(launched, kernel, lambda x, given: (x, given[0]))
    xs = [torch.randn(8, 4) for _ in range(4)]
    for x in xs:
        op(x, [x])
    assert len(full) == 2 and [address(second) for *_, second in kernel.reached.calls] == [x.data_ptr() for x in xs]
    op(xs[0], [xs[1]])
    assert len(full) == 3


UNCLEAR = {
    "copied": lambda x, given: (x.t().reshape(-1),),
    "computed": lambda x, given: (x + 1,),
    "from elsewhere": lambda x, given: (FOREIGN,),
    "parts of one memory": lambda x, given: (x, given[0]),
}
FOREIGN = torch.randn(4)


UNCLEAR_RESULTS = {"argument": lambda args: args[0], "view": lambda args: args[1][1:], "number": lambda args: 1}


@pytest.mark.parametrize("results", UNCLEAR_RESULTS.values(), ids=UNCLEAR_RESULTS)
def test_results_that_are_unclear_are_made_in_full(launched, results):
    kernel = Kernel()
    op, full = op_of(launched, kernel, lambda x, given: (x, torch.empty_like(x)), results)
    for _ in range(4):
        x, others = tensors()
        op(x, others)
    assert len(full) == 4


@pytest.mark.parametrize("name", UNCLEAR)
def test_what_is_unclear_is_launched_in_full(launched, name):
    kernel = Kernel()
    op, full = op_of(launched, kernel, UNCLEAR[name])
    memory = torch.randn(16, 4)
    x, others = (memory[:8], [memory[8:]]) if name == "parts of one memory" else tensors()
    for _ in range(4):
        op(x, others)
    assert len(full) == 4 and len(kernel.reached.calls) == 4


def test_a_launcher_of_another_make_is_launched_in_full(launched):
    kernel = Kernel()
    op, full = op_of(launched, kernel)
    x, others = tensors()
    op(x, others)
    reached = kernel.reached
    for compiled in kernel.made:
        compiled.run.launch = lambda *args: reached(*args)
    for _ in range(3):
        op(x, others)
    assert len(full) == 4 == len(kernel.reached.calls)


def test_profilers_see_launches(launched, monkeypatch):
    op, full = op_of(launched, Kernel())
    x, others = tensors()
    for _ in range(3):
        op(x, others)
    monkeypatch.setattr(repeated, "_is_watched", lambda: True)
    op(x, others)
    assert len(full) == 3
