"""Plans of the Hopper kernels: everything about a launch that is known when it compiles, as one frozen value.

A kernel takes its plan as a single compile-time argument. The functions at the end choose tiles from widths
alone, so that a model compiles once whatever its token counts; the numbers come from measurements on an H200.
"""

from dataclasses import dataclass

from moeblaze_ops.kernels.configs import ROW_BLOCK
from moeblaze_ops.kernels.eight_bits import integers_width, row_width
from moeblaze_ops.kernels.formulas.program import gradient_cost, gradient_program

ELEMENT_BYTES = 2
"""Bytes of a bf16 or fp16 element, the types that the Hopper kernels take."""

REGISTERS = 168
"""Registers a thread: 12 warps share 65536, and a 64 x 256 fp32 accumulator takes 128 of a consumer's."""


_EPILOGUE_BOUND = 1536
"""Width D up to which dA's epilogue takes longer than its product, so that more warps for it pay for a slower product."""

_BOUND_OF_A_STEP = 66
"""The same for each step of a gradient that has many: four warps take half as long for it, and the product a tenth longer."""

_FAR_EPILOGUE_BOUND = 512
"""Width D up to which it takes so much longer that it gets half of the product's registers, too."""


_FEW_COLUMNS = 64
"""Columns up to which a product takes as long as its rows take to arrive: more of them are on their way then."""

_FEW_ROWS = 16
"""Rows of an expert on average up to which a product takes as long as its weights take to arrive. Tiles are narrow then, so that
more multiprocessors read weights, and rows that a tile lacks are not read: 128 of them are as many bytes as its weights."""

_CACHED_BYTES = 32 << 20
"""Bytes that stay in L2 beside what else is read; it has 50 MB."""

_MOST_STEPS = 18
"""Steps of a gated gradient that fit 144 registers, and if there are no more than two choices among them 96."""


@dataclass(frozen=True)
class Tile:
    """A tile of a GEMM: two consumers of ``block_m / 2`` rows each.

    ``stages`` tiles of the left operand are in flight, and ``lead`` fewer of the right one, which is larger and
    arrives sooner where the rows of the left one are gathered.
    """

    block_n: int
    stages: int
    lead: int = 0
    group: int = 8
    block_m: int = ROW_BLOCK
    block_k: int = 64

    @property
    def half_m(self) -> int:
        return self.block_m // 2

    @property
    def a_bytes(self) -> int:
        return self.block_m * self.block_k * ELEMENT_BYTES

    @property
    def b_bytes(self) -> int:
        return self.block_n * self.block_k * ELEMENT_BYTES


@dataclass(frozen=True)
class Warps:
    """Warps that gather rows and warps that finish tiles, beside two consumers of four.

    ``registers``: those of a thread of a consumer, of what gathers and of what finishes.
    """

    gather: int
    finish: int
    registers: tuple[int, int, int]

    @property
    def at_launch(self) -> int:
        """Registers of every thread at launch: an equal share of 65536, in units of 8; partitions are padded to four warps."""
        threads = 32 * (8 + 4 * ceil_div(self.gather + self.finish, 4))
        return 65536 // threads // 8 * 8

    @property
    def instruction_n(self) -> int:
        """Columns that one wgmma may multiply: ptxas checks a single instruction against the registers at launch."""
        return 256 if self.at_launch >= REGISTERS else 128


TWELVE_WARPS = Warps(2, 2, (REGISTERS, REGISTERS, REGISTERS))
SIXTEEN_WARPS = Warps(4, 4, (160, 48, 144))


@dataclass(frozen=True)
class LowRank:
    """The columns that a low-rank addition adds to what is contracted, behind all others; rank 0 for none.

    A stage of them is no longer than they are: what is multiplied beside the weight is not padded to the tile's ``block_k``.
    """

    rank: int = 0

    @property
    def block_k(self) -> int:
        return next((block for block in (16, 32) if self.rank <= block), 64)

    @property
    def steps(self) -> int:
        return ceil_div(self.rank, self.block_k)


@dataclass(frozen=True)
class RowsPlan:
    """``rows @ weight`` with ``parts`` (gate, up) summed: down projection, gradient of the up projection's input.

    With one expert a token rows go ``to_tokens``, perhaps weighted, and with a product of ``channels`` added. ``early``, here
    and below: products begin before the kernel launched last has ended.
    """

    tile: Tile
    contracted: int
    columns: int
    parts: int
    b_k_inner: bool
    bias_stride: int | None
    to_tokens: bool = False
    has_weights: bool = False
    channels: int = 0
    early: bool = False
    low: LowRank = LowRank()
    a_k_inner: bool = True
    gathered: bool = False
    instruction_n: int = 256

    @property
    def column_blocks(self) -> int:
        return ceil_div(self.columns, self.tile.block_n)

    @property
    def steps(self) -> int:
        """Stages that a tile takes, but for the low-rank ones."""
        return self.parts * ceil_div(self.contracted, self.tile.block_k)


@dataclass(frozen=True)
class GatherPlan:
    """``gathered rows @ weight``: up projection (``parts`` side by side in a tile), gradient of the activation.

    ``num_parameters``: those that the activation reads. ``few_rows``: rows that a tile lacks are not read.
    """

    tile: Tile
    contracted: int
    columns: int
    parts: int
    b_k_inner: bool
    top_k: int
    wide_offsets: bool
    activation: str
    gated: bool
    num_parameters: int = 0
    bias_stride: int | None = None
    has_weights: bool = False
    store_h: bool = True
    store_h8: bool = False
    warps: Warps = TWELVE_WARPS
    early: bool = False
    low: LowRank = LowRank()
    few_rows: bool = False
    a_k_inner: bool = True
    gathered: bool = True

    @property
    def steps(self) -> int:
        """Stages that a tile takes, but for the low-rank ones."""
        return ceil_div(self.contracted, self.tile.block_k)

    @property
    def instruction_n(self) -> int:
        return self.warps.instruction_n

    @property
    def part_n(self) -> int:
        """Columns of one part in a tile."""
        return self.tile.block_n // self.parts

    @property
    def column_blocks(self) -> int:
        return ceil_div(self.columns, self.part_n)

    @property
    def h_parts(self) -> int:
        return 2 if self.gated else 1

    @property
    def h8_row_bytes(self) -> int:
        return row_width(self.columns)

    @property
    def h8_integers_bytes(self) -> int:
        return integers_width(self.columns)


@dataclass(frozen=True)
class WeightGradPlan:
    """``grouped^T @ gathered`` over an expert's rows, or its transpose when ``gathered_is_a``; ``parts`` outputs.

    They are written, in pieces of ``store_n`` columns, or with ``accumulate`` added to what is there, but for experts
    that are marked as fresh where there are such marks. ``is_wider``: outputs are fp32, operands are not. ``early``: tiles
    begin before the kernel launched last has ended.
    """

    tile: Tile
    m: int
    n: int
    parts: int
    top_k: int
    wide_offsets: bool
    gathered_is_a: bool
    store_n: int
    accumulate: bool = False
    is_wider: bool = False
    has_fresh: bool = False
    early: bool = False
    load_warps: int = 2
    copy_warps: int = 2
    registers: int = REGISTERS
    a_k_inner: bool = False
    b_k_inner: bool = False
    gathered: bool = True
    low: LowRank = LowRank()
    instruction_n: int = 256

    @property
    def fetches(self) -> bool:
        """What is there is brought into the place of a tile that is about to be written, and added to it."""
        return self.accumulate and not self.is_wider

    @property
    def store_bytes(self) -> int:
        return self.tile.half_m * self.store_n * ELEMENT_BYTES

    @property
    def m_blocks(self) -> int:
        """Row blocks of one part."""
        return ceil_div(self.m, self.tile.block_m)

    @property
    def n_blocks(self) -> int:
        """Column blocks of one part."""
        return ceil_div(self.n, self.tile.block_n)

    @property
    def blocks(self) -> int:
        """Output tiles of one expert, all parts."""
        return self.m_blocks * self.n_blocks * self.parts

    @property
    def by_columns(self) -> bool:
        """All experts have their turn with one tile before the next one, which shares no more than a few columns with it."""
        return self.grouped_width <= _FEW_COLUMNS and not self.accumulate

    @property
    def gathered_block(self) -> int:
        return self.tile.block_m if self.gathered_is_a else self.tile.block_n

    @property
    def grouped_block(self) -> int:
        return self.tile.block_n if self.gathered_is_a else self.tile.block_m

    @property
    def gathered_width(self) -> int:
        return self.m if self.gathered_is_a else self.n

    @property
    def grouped_width(self) -> int:
        return self.n if self.gathered_is_a else self.m

    @property
    def grouped_bytes(self) -> int:
        return self.tile.b_bytes if self.gathered_is_a else self.tile.a_bytes


def ceil_div(size: int, block: int) -> int:
    return (size + block - 1) // block


def has_few_rows(num_rows: int, num_experts: int) -> bool:
    """True if most of a tile's rows are missing. What is chosen by it changes the order of no sum."""
    return num_rows <= _FEW_ROWS * num_experts


def rows_tile(columns: int, few_rows: bool) -> Tile:
    """Tile of the down projection and of the up projection's input gradient."""
    if columns <= _FEW_COLUMNS:
        return Tile(block_n=_FEW_COLUMNS, stages=8)
    return Tile(block_n=128, stages=6) if few_rows else Tile(block_n=_block_n(columns), stages=3)


def up_tile(columns: int, parts: int, few_rows: bool) -> Tile:
    """Tile of the up projection; its ``block_n`` holds ``parts`` blocks of columns."""
    if parts == 1 and columns <= _FEW_COLUMNS:
        return Tile(block_n=_FEW_COLUMNS, stages=8, lead=1)
    if few_rows:
        return Tile(block_n=128, stages=6, lead=1)
    return Tile(block_n=max(128, parts * _block_n(columns, 256 // parts)), stages=4, lead=1)


def reads_more_than_cached(tile: Tile, num_bytes: int) -> bool:
    """True if tokens of so many bytes are nearly all that a product with this tile reads, and too many for L2."""
    return tile.block_n <= _FEW_COLUMNS and num_bytes > _CACHED_BYTES


def down_backward_tile(columns: int, contracted: int) -> Tile:
    """Tile of the down projection's backward, narrow where the epilogue takes much longer than the product.

    A narrow tile leaves registers for more epilogue warps; a wide one reads less.
    """
    if contracted <= _FAR_EPILOGUE_BOUND:
        return Tile(block_n=_block_n(columns, 128), stages=5, lead=1)
    return Tile(block_n=_block_n(columns), stages=4, lead=1)


def down_backward_warps(contracted: int, activation: str) -> Warps:
    """Warps of the down projection's backward: more that finish where the epilogue bounds it and fits their registers."""
    if contracted > _EPILOGUE_BOUND:
        return SIXTEEN_WARPS if contracted <= _BOUND_OF_A_STEP * _num_short_steps(activation) else TWELVE_WARPS
    gradient = gradient_cost(activation)
    is_long = gradient.is_gated and gradient.num_steps > _MOST_STEPS
    if contracted > _FAR_EPILOGUE_BOUND:
        return TWELVE_WARPS if is_long else SIXTEEN_WARPS
    return Warps(2, 4, (128, 128, 128)) if is_long and gradient.num_choices > 2 else Warps(2, 8, (96, 96, 96))


def _num_short_steps(activation: str) -> int:
    """Steps of the gradient's program in short forms: about as many as an element's instructions less those of any epilogue."""
    return gradient_program(activation, is_short=True).split("|")[0].count(";") + 1


def num_partials(columns: int, contracted: int) -> int:
    """Partial sums of dweights that the down projection's backward writes for a row: one for each column block."""
    return ceil_div(columns, down_backward_tile(columns, contracted).block_n)


def weight_grad_tile(fetches: bool) -> Tile:
    """Tile of the weight gradients; a whole one that is fetched takes the place of a stage."""
    return Tile(block_n=256, stages=3 if fetches else 4, group=16)


def _block_n(columns: int, largest: int = 256) -> int:
    return largest if columns > largest // 2 else max(64, largest // 2)
