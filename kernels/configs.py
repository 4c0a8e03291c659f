"""Tile configurations: frozen values and the pure functions that choose among them.

A choice depends on the operands' type, on widths (``None`` when symbolic), on the mean number of rows of an
expert (``None`` when symbolic) and on the device capability, never on a timing: one compiled kernel serves
every token count. The sizes come from measurements on an H200; other devices get the same tiles with as many
pipeline stages as their shared memory holds.
"""

from dataclasses import dataclass, replace

ROW_BLOCK = 128
"""Rows of one entry of the block schedule that ``dispatch`` writes; every kernel's BLOCK_M divides it."""

SIGMOID_EPS = 1e-20
"""Added to the sum that renormalizes sigmoid scores, as DeepSeek-V3 does; softmax scores are divided by their sum."""

COLUMN_UNIT = 256
"""Columns of the widest tile of the model width: a range of columns is a multiple of them."""

FEW_CHANNELS = 8
"""Channels of a product up to which multiplying them one by one is faster than tensor cores."""

MOST_RANKS_AT_ONCE = 32
"""Ranks of a low-rank part up to which one pass over a gradient gives both of what hangs on it."""

_SHARED_MEMORY_BYTES = {
    (7, 5): 64 << 10,
    (8, 0): 163 << 10,
    (8, 7): 163 << 10,
    (9, 0): 227 << 10,
    (10, 0): 227 << 10,
    (10, 3): 227 << 10,
}
_SHARED_MEMORY_BYTES_CONSUMER = 99 << 10


@dataclass(frozen=True)
class Operands:
    """What a product multiplies: elements of ``element_size`` bytes, on tensor cores or not (fp32 without TF32)."""

    element_size: int
    tensor_cores: bool


@dataclass(frozen=True)
class GemmConfig:
    """Tile of a grouped GEMM: a program computes ``block_m x block_n`` and contracts ``block_k`` elements at a time.

    ``group`` row tiles share each column tile before the next column starts, so that weights stay in L2.
    """

    block_m: int
    block_n: int
    block_k: int
    group: int
    num_warps: int
    num_stages: int

    @property
    def options(self) -> dict[str, int]:
        """What a kernel is compiled and launched with."""
        blocks = {"BLOCK_M": self.block_m, "BLOCK_N": self.block_n, "BLOCK_K": self.block_k, "GROUP": self.group}
        return {**blocks, "num_warps": self.num_warps, "num_stages": self.num_stages}


@dataclass(frozen=True)
class TileConfig:
    """Tile of a memory-bound kernel: ``rows x columns`` elements a program (or a step of its loop)."""

    rows: int
    columns: int
    num_warps: int


@dataclass(frozen=True)
class DispatchConfig:
    """``chunk`` slots a program, ranked ``step`` at a time; ``bins`` for experts, unused slots and the rest."""

    chunk: int
    step: int
    bins: int
    num_warps: int


def shared_memory_bytes(capability: tuple[int, int]) -> int:
    """Shared memory that one program may use, in bytes, on a device of this capability."""
    return _SHARED_MEMORY_BYTES.get(capability, _SHARED_MEMORY_BYTES_CONSUMER)


def feeds_from_shared_memory(capability: tuple[int, int]) -> bool:
    """True if tensor cores read operands from shared memory (wgmma, tcgen05), which leaves registers to wider tiles."""
    return capability[0] in (9, 10)


def joins_columns(tile: GemmConfig, capability: tuple[int, int]) -> bool:
    """True if gate and up are one product of twice the columns, in a tile of the projection to both.

    Tensor cores that read shared memory multiply 64 rows or more by up to 256 columns and leave halves of the columns to each
    thread.
    """
    return tile.block_m >= 64 and feeds_from_shared_memory(capability)


def block_rows(rows_per_expert: int | None) -> int:
    """BLOCK_M for an expert with this many rows on average; the whole schedule entry when that is symbolic."""
    if rows_per_expert is None:
        return ROW_BLOCK
    return next((block for block in (16, 32, 64) if rows_per_expert <= block), ROW_BLOCK)


_MOST_VALUE_STEPS, _MOST_GRADIENT_STEPS = 14, 23
"""Steps of an activation, and of its gradient, that leave registers to a wide tile."""
_FEW_GRADIENT_STEPS = 9
"""Steps of a gradient that leave registers to the widest tile."""


def choose_expert_up(
    operands: Operands,
    D: int | None,
    F: int | None,
    gated: bool,
    rows_per_expert: int | None,
    capability: tuple[int, int],
    num_steps: int = 0,
) -> GemmConfig:
    """Tile of ``[rows, D] @ [D, F]``, with one accumulator, or two when gated; long activations have half the columns."""
    is_long = num_steps > _MOST_VALUE_STEPS and feeds_from_shared_memory(capability)
    if not gated:
        tile = choose_expert_rows(operands, D, F, rows_per_expert, capability)
        return replace(tile, block_n=min(tile.block_n, 128)) if is_long else tile
    block_m = block_rows(rows_per_expert)
    if not operands.tensor_cores:
        tile = GemmConfig(min(block_m, 64), 32, 64, 16, 4, 3)
    elif block_m < 64:
        tile = GemmConfig(block_m, 64, 256, 16, 4, 3)
    else:
        tile = GemmConfig(block_m, 128 if feeds_from_shared_memory(capability) and not is_long else 64, 128, 16, 8, 4)
    return _fit(tile, operands, D, F, 2, capability)


def choose_expert_rows(
    operands: Operands,
    contraction: int | None,
    columns: int | None,
    rows_per_expert: int | None,
    capability: tuple[int, int],
) -> GemmConfig:
    """Tile of ``[rows, contraction] @ [contraction, columns]`` with one accumulator: down, and dX."""
    block_m = block_rows(rows_per_expert)
    if not operands.tensor_cores:
        tile = GemmConfig(min(block_m, 64), 64, 64, 16, 4, 3)
    elif block_m < 64:
        tile = GemmConfig(block_m, 128, 256, 16, 4, 3)
    else:
        is_wide = feeds_from_shared_memory(capability)
        tile = GemmConfig(block_m, 256 if is_wide else 128, 128, 16, 8, 3 if is_wide else 4)
    return _fit(tile, operands, contraction, columns, 1, capability)


def choose_expert_down_backward(
    operands: Operands,
    D: int | None,
    F: int | None,
    rows_per_expert: int | None,
    capability: tuple[int, int],
    num_steps: int = 0,
    reads_eight_bits: bool = False,
) -> GemmConfig:
    """Tile of ``[rows, D] @ [D, F]`` whose epilogue also holds strips of h, dh and a; of a long gradient fewer a thread."""
    is_long = num_steps > _MOST_GRADIENT_STEPS
    is_short = num_steps <= _FEW_GRADIENT_STEPS and not reads_eight_bits and operands.element_size == 2
    fits_widest = is_short and capability[0] == 9 and F is not None and F % 256 == 0
    block_m = block_rows(rows_per_expert)
    if not operands.tensor_cores:
        tile = GemmConfig(min(block_m, 64), 32, 64, 16, 4, 3)
    elif block_m < 64:
        tile = GemmConfig(block_m, 64, 256, 16, 4, 3)
    elif fits_widest and block_m == 128:
        tile = GemmConfig(block_m, 256, 128, 16, 8, 4)
    else:
        tile = GemmConfig(block_m, 128 if operands.element_size == 2 and not is_long else 64, 128, 16, 8, 4)
    fitted = _fit(tile, operands, D, F, 1, capability)
    return replace(fitted, num_warps=8) if is_long and fitted.block_m >= 64 else fitted


def choose_weight_grad(operands: Operands, F: int | None, D: int | None, capability: tuple[int, int]) -> GemmConfig:
    """Tile of ``[D, rows] @ [rows, F]``, contracted over the rows of one expert: BLOCK_M of D, BLOCK_N of F."""
    if not operands.tensor_cores:
        tile = GemmConfig(64, 64, 64, 8, 4, 2)
    elif feeds_from_shared_memory(capability) and (F is None or -(-F // 128) % 2 == 0):
        tile = GemmConfig(128, 256, 128, 8, 8, 3)
    else:
        tile = GemmConfig(128, 128, 128, 8, 4 if feeds_from_shared_memory(capability) else 8, 3)
    fitted = _fit(replace(tile, block_m=_clip(tile.block_m, D)), operands, None, F, 1, capability)
    # The pipeline spends every other stage on the index that the gather waits for: stages come cheaper here.
    return replace(fitted, num_stages=2 * fitted.num_stages - 1)


def choose_low_rank_backward(
    operands: Operands, width: int | None, rank: int, gathered: bool, capability: tuple[int, int]
) -> GemmConfig | None:
    """Tile of the one pass over the gradient of a low-rank part: ``block_m`` of its columns, ``block_n`` ranks, ``block_k`` rows.

    None where ``rank`` fp32 sums for each tile are as many bytes as its columns are: then two passes read less.
    """
    if rank > MOST_RANKS_AT_ONCE:
        return None
    if feeds_from_shared_memory(capability) and operands.element_size == 2 and rank <= 16:
        # 64 rows, for wgmma. Rows that are read by index have a buffer less: narrow tiles leave room for two programs.
        columns = _clip(256 if gathered else 512, width)
        fitted = _fit(GemmConfig(columns, 16, 128, 1, 4, 3), operands, None, rank, 1, capability)
        return replace(fitted, num_warps=8 if columns == 512 else 4)
    # The sums take 64 registers a thread, a stage 32 KB.
    most = (512 if feeds_from_shared_memory(capability) else 256) // (1 if rank <= 16 else 2)
    columns = _clip(most if operands.tensor_cores else 64, width)
    tile = GemmConfig(columns, MOST_RANKS_AT_ONCE, min(128, 32768 // columns), 1, 4, 3)
    return _fit(tile, operands, None, rank, 1, capability)


def choose_rank_block(operands: Operands, rank: int) -> int:
    """Columns of a low-rank product that are contracted at a time: few, since they lie in registers beside the sums."""
    return _clip(32 if operands.tensor_cores else 16, rank)


def choose_column_ranges(num_rows: int | None, D: int, element_size: int, max_bytes: int | None) -> list[range]:
    """Columns of a ``[num_rows, D]`` buffer to compute in turns, so that the part for one of them takes ``max_bytes`` at most.

    As few ranges as that takes, as equal as multiples of COLUMN_UNIT are, the widest first. A single unit may take more
    bytes, and nothing is cut where ``num_rows`` or ``max_bytes`` is None.
    """
    if num_rows is None or max_bytes is None or num_rows * D * element_size <= max_bytes:
        return [range(D)]
    num_units = -(-D // COLUMN_UNIT)
    most_units = max(1, max_bytes // (num_rows * COLUMN_UNIT * element_size))
    num_ranges = -(-num_units // most_units)
    ends = [-(-num_units * (index + 1) // num_ranges) * COLUMN_UNIT for index in range(num_ranges)]
    return [range(first, min(end, D)) for first, end in zip([0, *ends], ends, strict=False)]


def choose_combine(columns: int | None) -> TileConfig:
    """Tile of the gather-sum: 1024 elements, so that two warps move 32 bytes a thread and choice."""
    widest = COLUMN_UNIT if columns is not None and columns % 512 == COLUMN_UNIT else 512
    columns = _clip(widest, columns)
    return TileConfig(1024 // columns, columns, 2)


def choose_combine_few(columns: int | None) -> TileConfig:
    """Tile of the gather-sum of few used slots among many: one token, so that none waits for one with more, 16 bytes a thread."""
    columns = _clip(1024 if columns is not None and columns % 1024 == 0 else choose_combine(columns).columns, columns)
    return TileConfig(1, columns, max(1, columns // 256))


def choose_add_rows(columns: int | None) -> TileConfig:
    """Tile of the sum of rows and a token: 1024 columns where their number allows it, 16 of them a thread."""
    widest = next((width for width in (1024, 512) if columns is None or columns % width == 0), COLUMN_UNIT)
    columns = _clip(widest, columns)
    return TileConfig(1, columns, max(1, columns // 512))


def choose_combine_product(operands: Operands, columns: int | None, channels: int | None) -> TileConfig:
    """Tile of the gather-sum with a product in it: tokens enough that its right side is read from cache a few times only."""
    if not operands.tensor_cores:
        return TileConfig(16, _clip(64, columns), 4)
    wide = channels is not None and channels >= 64 and columns is not None and columns % 256 == 0
    return TileConfig(32, 256, 8) if wide else TileConfig(32, _clip(128, columns), 4)


def choose_row_dot(D: int | None) -> TileConfig:
    """Tile of a row-by-row inner product over D; a range of columns is a multiple of it, but for the last one's end."""
    columns = _clip(COLUMN_UNIT, D)
    return TileConfig(1024 // columns, columns, 4)


def choose_bias_grad(columns: int | None) -> TileConfig:
    """Tile of the column sums over an expert's rows."""
    block = _clip(128, columns)
    return TileConfig(4096 // block, block, 4)


def bias_grad_splits(num_experts: int, column_blocks: int | None) -> int:
    """Parts into which an expert's rows are cut, to give about 1024 programs whatever E and the width are."""
    if column_blocks is None:
        return 8
    return max(1, min(64, 1024 // max(1, num_experts * column_blocks)))


def choose_dispatch(num_experts: int) -> DispatchConfig:
    """Chunks of the counting sort: as many slots as bins or more, so that the counts are no larger than the slots."""
    bins = max(32, 1 << (num_experts + 1).bit_length())
    return DispatchConfig(chunk=max(512, bins), step=256, bins=min(bins, 1024), num_warps=4)


def choose_route(columns: int) -> TileConfig:
    """Rows of logits, padded to ``columns``, that a program holds: at most 16 keys a thread, 32 for 1024 columns.

    Rows inside one warp need no barrier in the K rounds, and several of them give rounds that overlap.
    """
    return TileConfig(max(1, min(16, 512 // columns)), columns, 1 if columns <= 1024 else min(16, columns // 512))


def choose_route_backward(columns: int) -> TileConfig:
    """Rows of dlogits, padded to ``columns``, that a program writes."""
    return TileConfig(max(1, min(64, 2048 // columns)), columns, 4 if columns <= 2048 else 8)


def choose_router_sums(columns: int) -> TileConfig:
    """Rows of logits, padded to ``columns``, that a program sums at a time: most programs have no more."""
    return TileConfig(max(1, min(128, 8192 // columns)), columns, 8)


def router_sum_parts(columns: int) -> int:
    """Parts into which the tokens are cut for sums of rows of logits, padded to ``columns``: so that their sums stay small."""
    return max(64, min(512, 131072 // columns))


def choose_router_product(operands: Operands, D: int | None, capability: tuple[int, int], T: int | None = None) -> TileConfig:
    """Tokens and columns of D that a program of either product takes at a time: 256 bytes of each token, 512 of few."""
    is_wide = operands.tensor_cores and _is_few(T) and _holds_wide_router_tiles(capability)
    return TileConfig(64, _clip((512 if is_wide else 256) // operands.element_size, D), 4)


def choose_router_block(operands: Operands, E: int | None, T: int | None, capability: tuple[int, int]) -> int:
    """Experts whose logits a program takes: all or many of them, and a few where there are few tokens to take."""
    many = 128 if _holds_wide_router_tiles(capability) else 32
    return _clip(many if operands.tensor_cores and not _is_few(T) else 16, E)


def _is_few(T: int | None) -> bool:
    """True if so few tokens fill no GPU. What is chosen by it changes the order of no sum."""
    return T is not None and T <= 1024


def _holds_wide_router_tiles(capability: tuple[int, int]) -> bool:
    """True if shared memory has room for four stages of 48 KiB, of which one may be on its way from registers."""
    return shared_memory_bytes(capability) >= 160 << 10


def router_parts(column_blocks: int | None) -> int:
    """Parts into which the tokens are cut, to give about 512 programs whatever the width is."""
    return 32 if column_blocks is None else max(1, min(128, 512 // column_blocks))


def _fit(
    tile: GemmConfig,
    operands: Operands,
    contraction: int | None,
    columns: int | None,
    num_weights: int,
    capability: tuple[int, int],
) -> GemmConfig:
    """``tile``, with block_k in bytes, cut to the widths of the problem and to the shared memory of the device."""
    block_n = _clip(tile.block_n, columns)
    block_k = _clip(tile.block_k // operands.element_size, contraction)
    # A warp for every 4 KB of results, so that their epilogue fits its registers.
    num_warps = min(tile.num_warps, max(4, num_weights * tile.block_m * block_n * operands.element_size // 4096))
    limit = shared_memory_bytes(capability)
    while True:
        stage = (tile.block_m + num_weights * block_n) * block_k * operands.element_size
        num_stages = min(tile.num_stages, limit // stage)
        if num_stages >= 2 or block_k == 16:
            return GemmConfig(tile.block_m, block_n, block_k, tile.group, num_warps, max(1, num_stages))
        block_k //= 2


def _clip(block: int, size: int | None) -> int:
    """``block``, or the power of two that covers ``size`` when that is less: 16 at least, as tensor cores take."""
    if size is None:
        return block
    return max(16, min(block, 1 << (max(size, 1) - 1).bit_length()))
