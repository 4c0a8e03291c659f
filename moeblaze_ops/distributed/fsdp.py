"""``fully_shard`` of a block whose experts are sharded on another mesh axis."""

from collections.abc import Callable

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard


def expert_placement(block: nn.Module, expert_mesh: DeviceMesh, mesh: DeviceMesh) -> Callable[[nn.Parameter], object]:
    """The ``shard_placement_fn`` for ``fully_shard(block, mesh=mesh)`` after ``shard_experts``.

    Experts, ``Shard(0)`` on their own axis, are sharded on their second axis over ``expert_mesh``: the ranks that store the same
    experts. All other parameters are sharded on their first axis over ``mesh``: all ranks.

    Where every expert is stored once, ``expert_mesh`` has one rank: pass ``ignored_params=`` the experts to ``fully_shard``
    instead.

    Args:
        block: what is passed to ``fully_shard``.
        expert_mesh: such as ``mesh["efsdp"]``. mesh: such as ``mesh["efsdp", "ep"]._flatten()``. One axis each, or two for
            HSDP: an axis of replicas before it.

    Raises:
        NotImplementedError: ``fully_shard`` of torch before 2.13 takes one mesh for all parameters of a call.
    """
    from torch.distributed.fsdp._fully_shard import _fsdp_common, _fsdp_init

    result = getattr(_fsdp_common, "ShardPlacementResult", None)
    if result is None:
        way = "call fully_shard on the experts' module with expert_mesh, and then on the block"
        raise NotImplementedError(f"expert_placement: torch must be 2.13 or newer ({way})")
    experts = {p for p in block.parameters() if isinstance(p, DTensor)}
    of_experts, of_others = (_fsdp_init._get_mesh_info(each, None) for each in (expert_mesh, mesh))

    def placement(parameter: nn.Parameter) -> object:
        if parameter in experts:
            return result(placement=Shard(1), mesh_info=of_experts)
        return result(placement=Shard(0), mesh_info=of_others)

    return placement
