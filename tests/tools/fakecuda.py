"""Lower graphs for a CUDA device that is not there, and read the code that Inductor generates for it.

``generated_code`` compiles a function of fake CUDA tensors. ``shadow_backend`` runs each forward and backward graph on the
CPU as it is, and lowers it for CUDA: that covers training, which fake tensors alone do not. Nothing is launched or built, and
caches are off. Both stand on private parts of torch, which is why they live with the tests.
"""

import contextlib
import copy
import ctypes
import functools
import shutil
import subprocess
import sysconfig
import tempfile
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch.utils._pytree import tree_map

from tests.tools.compiling import graphs_compiled_anew

_GUARD_SOURCE = """
#include <c10/core/impl/DeviceGuardImplInterface.h>
static c10::impl::NoOpDeviceGuardImpl<c10::DeviceType::CUDA> guard;
static c10::impl::DeviceGuardImplRegistrar registrar(c10::DeviceType::CUDA, &guard);
"""


class _Captured(Exception):
    """Stops a compile once its code is known."""


def require_fake_cuda() -> None:
    """Skip the calling test where the code for a CUDA device cannot be generated."""
    pytest.importorskip("triton", reason="Inductor generates Triton code only where Triton is installed")
    if not torch.backends.cuda.is_built() and shutil.which("g++") is None:
        pytest.skip("a torch without CUDA needs g++ to build a device guard for fake CUDA tensors")
    _register_device_guard()


@functools.cache
def _register_device_guard() -> None:
    """Give a torch without CUDA a guard for CUDA devices: autograd on a fake CUDA tensor aborts the process without."""
    if torch.backends.cuda.is_built():
        return
    torch_folder = Path(torch.__file__).parent
    folder = Path(tempfile.mkdtemp(prefix="moeblaze-guard-"))
    source, library = folder / "guard.cpp", folder / "guard.so"
    source.write_text(_GUARD_SOURCE)
    flags = ["-O0", "-shared", "-fPIC", "-std=c++20", f"-I{torch_folder}/include", f"-I{sysconfig.get_path('include')}"]
    subprocess.run(["g++", *flags, str(source), "-o", str(library), f"-L{torch_folder}/lib", "-lc10"], check=True, timeout=300)
    ctypes.CDLL(str(library))


def _device_properties(capability: tuple[int, int]) -> types.SimpleNamespace:
    major, minor = capability
    return types.SimpleNamespace(
        name="fake CUDA device",
        major=major,
        minor=minor,
        multi_processor_count=132,
        total_memory=80 << 30,
        warp_size=32,
        shared_memory_per_block=48 << 10,
        shared_memory_per_block_optin=227 << 10,
        regs_per_multiprocessor=65536,
        max_threads_per_multi_processor=2048,
        max_threads_per_block=1024,
        L2_cache_size=50 << 20,
        gcnArchName="",
        uuid="fake",
        pci_bus_id=0,
    )


def _driver(capability: tuple[int, int]):
    from triton.backends.compiler import GPUTarget

    class Driver:
        def get_current_target(self):
            return GPUTarget("cuda", capability[0] * 10 + capability[1], 32)

        def get_current_device(self):
            return 0

        def get_active_torch_device(self):
            return torch.device("cuda", 0)

    return Driver()


_ANALYSES: dict[tuple, object] = {}


def _analysed_once() -> contextlib.AbstractContextManager:
    """A context in which torch looks once at what a kernel reads and writes, for arguments of one kind.

    Otherwise each graph has Triton make code for each of its launches, twice.
    """
    from torch._higher_order_ops import triton_kernel_wrap

    names = "identify_accessed_tensors", "identify_mutated_tensors"  # of torch 2.13, and of 2.11
    name = next(name for name in names if hasattr(triton_kernel_wrap, name))
    analyse = getattr(triton_kernel_wrap, name)

    def kind(value: object, is_constant: bool) -> object:
        if hasattr(value, "dtype"):
            return value.dtype
        if type(value) is int and not is_constant:
            return value == 1, value % 16 == 0
        return repr(value) if value is None or isinstance(value, bool | int | float | str) else type(value)

    def analyse_once(kernel, kwargs, descriptors):
        parameters = kernel.params if hasattr(kernel, "params") else kernel.fn.params  # of a kernel that is tuned
        constants = {parameter.name for parameter in parameters if parameter.is_constexpr}
        key = id(kernel), *((name, kind(value, name in constants)) for name, value in kwargs.items())
        if descriptors or key not in _ANALYSES:
            _ANALYSES[key] = analyse(kernel, kwargs, descriptors)
        for option in kwargs.keys() - set(kernel.arg_names):  # as the analysis does
            del kwargs[option]
        return _ANALYSES[key]

    return mock.patch.object(triton_kernel_wrap, name, analyse_once)


@contextlib.contextmanager
def fake_device(capability: tuple[int, int] = (9, 0)) -> Iterator[None]:
    """A context in which torch and Triton believe in a CUDA device of this compute capability."""
    import torch._inductor.fx_passes.joint_graph as joint_graph
    import triton
    from torch._dynamo.device_interface import CudaInterface
    from torch._inductor.runtime.hints import DeviceProperties

    properties = _device_properties(capability)
    hints = DeviceProperties(
        type="cuda",
        index=0,
        multi_processor_count=properties.multi_processor_count,
        cc=capability[0] * 10 + capability[1],
        major=capability[0],
        regs_per_multiprocessor=properties.regs_per_multiprocessor,
        max_threads_per_multi_processor=properties.max_threads_per_multi_processor,
        warp_size=properties.warp_size,
    )
    cpu_hints = DeviceProperties(type="cpu", index=0, multi_processor_count=1, cc="")
    initialise = joint_graph.lazy_init

    def constant(value) -> staticmethod:
        return staticmethod(lambda *args, **kwargs: value)

    def device_hints(device) -> DeviceProperties:
        return hints if torch.device(device).type == "cuda" else cpu_hints

    patches = [
        _analysed_once(),
        # Its patterns are traced on a device that has to exist.
        mock.patch.object(joint_graph, "lazy_init", lambda device=None: initialise(torch.device("cpu"))),
        mock.patch.object(DeviceProperties, "create", staticmethod(device_hints)),
        mock.patch.object(CudaInterface, "is_bf16_supported", constant(True)),
        mock.patch.object(CudaInterface, "is_available", constant(True)),
        mock.patch("torch.cuda.get_device_properties", constant(properties).__func__),
        mock.patch("torch.cuda.get_device_capability", constant(capability).__func__),
        mock.patch("torch.cuda.current_device", constant(0).__func__),
        mock.patch.object(triton.runtime.driver, "_active", _driver(capability)),
        # `has_triton` is cached: an earlier compile for the CPU has made it False.
        mock.patch("torch._inductor.scheduler.has_triton", lambda *args: True),
    ]
    for interface in (CudaInterface, CudaInterface.Worker):
        patches.append(mock.patch.object(interface, "get_device_properties", constant(properties)))
        patches.append(mock.patch.object(interface, "current_device", constant(0)))
    with contextlib.ExitStack() as stack:
        for patch in patches:
            stack.enter_context(patch)
        yield


@contextlib.contextmanager
def _recording(sources: list[str]) -> Iterator[None]:
    from torch._inductor.graph import GraphLowering

    def record(graph, wrapper_code, *args):
        sources.append(wrapper_code.value)
        raise _Captured

    with mock.patch.object(GraphLowering, "_compile_to_module_lines", record):
        yield


def generated_code(
    function: Callable, inputs: tuple, *, dynamic: bool = False, capability: tuple[int, int] = (9, 0), **options
) -> str:
    """The code that Inductor generates for ``function`` of fake CUDA tensors, without comments.

    ``options`` are Inductor configuration patches. The first graph only: nothing can run, so nothing follows it.
    """
    import torch._inductor.config as inductor_config

    require_fake_cuda()
    sources: list[str] = []
    torch._dynamo.reset()
    with fake_device(capability), _recording(sources), graphs_compiled_anew(), inductor_config.patch(options):
        try:
            torch.compile(function, dynamic=dynamic)(*inputs)
        except Exception:
            if not sources:
                raise
    torch._dynamo.reset()
    assert sources, "no graph was compiled"
    return without_comments(sources[0])


def shadow_backend(sources: list[str], capability: tuple[int, int] = (9, 0)) -> Callable:
    """A backend that runs graphs on the CPU and appends to ``sources`` the code of each, lowered for CUDA."""
    from functorch.compile import make_boxed_func
    from torch._inductor.compile_fx import compile_fx, compile_fx_inner

    require_fake_cuda()
    kept = ("is_backward", "is_inference", "static_input_idxs", "boxed_forward_device_index", "graph_id")

    def lower(gm, inputs, **keywords):
        twin = _for_cuda(gm)
        twin_inputs = [node.meta["val"] for node in twin.graph.nodes if node.op == "placeholder"]
        recorded: list[str] = []
        with fake_device(capability), _recording(recorded):
            try:
                compile_fx_inner(twin, twin_inputs, **{key: keywords[key] for key in kept if key in keywords})
            except Exception:
                if not recorded:
                    raise
        sources.extend(without_comments(source) for source in recorded)
        return make_boxed_func(gm.forward)

    def backend(gm, inputs):
        with graphs_compiled_anew():
            return compile_fx(gm, inputs, inner_compile=lower)

    return backend


def _for_cuda(gm: torch.fx.GraphModule) -> torch.fx.GraphModule:
    """A copy of ``gm`` whose fake tensors and device arguments are on CUDA."""
    from torch._guards import detect_fake_mode

    cuda = torch.device("cuda", 0)
    fake_mode = detect_fake_mode([node.meta.get("val") for node in gm.graph.nodes if node.op == "placeholder"])

    def move_device(value):
        return cuda if isinstance(value, torch.device) and value.type == "cpu" else value

    def move_tensor(value):
        if not isinstance(value, torch.Tensor) or value.device.type != "cpu":
            return value
        with fake_mode:
            return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=cuda)

    twin = copy.deepcopy(gm)
    for node in twin.graph.nodes:
        node.args, node.kwargs = tree_map(move_device, node.args), tree_map(move_device, node.kwargs)
        for key in ("val", "eager_input_vals"):
            if key in node.meta:
                node.meta[key] = tree_map(move_tensor, node.meta[key])
    twin.recompile()
    return twin


def without_comments(code: str) -> str:
    """``code`` without the lines that are only a comment: they quote the graph, op names included."""
    return "\n".join(line for line in code.splitlines() if not line.lstrip().startswith("#"))


def launches(code: str) -> list[str]:
    """Names of the Triton kernels that ``code`` launches, in order, without Inductor's numbering."""
    import re

    return re.findall(r"(\w+?)(?:_\d+)?\.run\(", code)
