"""Compiles kernels for a GPU that is not there: what launchers would launch, and the resources it would take.

A launcher runs on fake CUDA tensors while its launches are recorded instead of made; each record is then
compiled for a target with the same specialisation (alignment, values equal to one) that a real launch would get. Triton
keeps what it compiled by the digest of its sources, so kernels that did not change are not compiled again on a machine.
"""

import contextlib
import functools
import re
import subprocess
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from unittest import mock

import torch
import triton
from torch._subclasses import FakeTensorMode
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from moeblaze_ops.kernels import launch as launch_module

_TYPE_NAMES = {
    torch.bool: "*i1",
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.float32: "*fp32",
    torch.int32: "*i32",
    torch.int8: "*i8",
    torch.int64: "*i64",
}


@dataclass(frozen=True)
class Launch:
    """One recorded launch: the kernel, its grid, its arguments by name, and warps and stages."""

    kernel: object
    num_programs: object
    arguments: dict
    options: dict

    @property
    def name(self) -> str:
        return self.kernel.__name__


@dataclass(frozen=True)
class Resources:
    """What a compiled kernel takes: bytes of stack, for registers that it spills, and of shared memory; and how it multiplies."""

    spill_bytes: int
    shared_bytes: int
    tensor_core: str | None


@contextlib.contextmanager
def recorded_launches(capability: tuple[int, int]):
    """Yields the list that collects launches; tensors made inside are fake, on a device of ``capability``."""
    launches = []

    class Recorder:
        def __init__(self, kernel):
            self.kernel = kernel

        def __getitem__(self, grid):
            def record(*args, **keywords):
                arguments = dict(zip(self.kernel.arg_names, args, strict=False))
                options = {name: keywords.pop(name) for name in ("num_warps", "num_stages") if name in keywords}
                launches.append(Launch(self.kernel, grid[0], arguments | keywords, options))

            return record

    with (
        FakeTensorMode(),
        mock.patch.object(torch.cuda, "get_device_capability", lambda device=None: capability),
        mock.patch.object(launch_module, "wrap_triton", Recorder),
    ):
        yield launches


def with_wide_sizes(launch: Launch, other: Launch) -> Launch:
    """``launch`` with each number that is another one in ``other`` too large for 32 bits.

    So a compiler passes sizes of which it knows nothing, and what it computes from them.
    """
    assert launch.kernel is other.kernel
    wide = {}
    for parameter in launch.kernel.params:
        value = launch.arguments[parameter.name]
        if not parameter.is_constexpr and type(value) is int and value != other.arguments[parameter.name]:
            wide[parameter.name] = 1 << 40
    return replace(launch, arguments=launch.arguments | wide)


def compile_launch(launch: Launch, capability: tuple[int, int]) -> Resources:
    """Compiles a recorded launch for a device of this capability and reads its resources."""
    kernel = launch.kernel
    signature, constants, attributes = {}, {}, {}
    for parameter in kernel.params:
        value = launch.arguments[parameter.name]
        position = (kernel.arg_names.index(parameter.name),)
        specialised = not parameter.do_not_specialize
        if parameter.is_constexpr or value is None or (specialised and value is not False and _is_one(value)):
            signature[parameter.name] = "constexpr"
            constants[position] = value
            continue
        if isinstance(value, torch.Tensor):
            signature[parameter.name] = _TYPE_NAMES[value.dtype]
            aligned = value.storage_offset() * value.element_size() % 16 == 0
        else:
            signature[parameter.name] = "i32" if abs(value) < 1 << 31 else "i64"
            aligned = specialised and value % 16 == 0
        if aligned:
            attributes[position] = [["tt.divisibility", 16]]
    # Launches of one step often differ in nothing that is compiled for.
    key = (kernel.__name__, repr(signature), repr(constants), repr(attributes), repr(launch.options), capability)
    if key not in _COMPILED:
        source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=attributes)
        target = GPUTarget("cuda", capability[0] * 10 + capability[1], 32)
        _COMPILED[key] = resources_of(triton.compile(source, target=target, options=launch.options))
    return _COMPILED[key]


_COMPILED: dict[tuple, Resources] = {}


def resources_of(kernel: triton.compiler.CompiledKernel) -> Resources:
    """The resources of a kernel that was compiled, and its tensor-core instruction: wgmma, tcgen05, mma or none."""
    instruction = re.search(r"(wgmma|tcgen05)\.mma|mma\.sync", kernel.asm["ptx"])
    tensor_core = instruction and (instruction.group(1) or "mma")
    return Resources(_stack_bytes(kernel.asm["cubin"]), kernel.metadata.shared, tensor_core)


_CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"


@functools.cache
def _stack_bytes(binary: bytes) -> int:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as cubin:
        cubin.write(binary)
        cubin.flush()
        usage = subprocess.run([_CUOBJDUMP, "--dump-resource-usage", cubin.name], capture_output=True, text=True)
    return int(re.search(r"STACK:(\d+)", usage.stdout)[1])


def _is_one(value) -> bool:
    return isinstance(value, int) and value == 1
