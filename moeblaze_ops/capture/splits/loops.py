"""Loops over rows that were sorted by expert and split by counts on the host, as loops over groups of rows.

    sizes = torch.bincount(ids, minlength=E).tolist()           sizes = torch.bincount(ids, minlength=E)
    start = 0                                                   ends = sizes.cumsum(0)
    for e, size in enumerate(sizes):                            for e in range(E):
        end = start + size                                          rows = row_groups.rows(ends, e, x)
        if size == 0:                                               if rows.numel() == 0:
            continue                                                    continue
        parts.append(experts[e](x[start:end]))                      out = row_groups.put(out, experts[e](x[rows]), rows)
        start = end
    out = torch.cat(parts)

Both are the same function for sizes that are not negative. That they are counts, and of what the rows were sorted by, is
proven in the graph; without that, the function is compiled as it was.
"""

import ast
import copy
from collections.abc import Iterator, Sequence

from moeblaze_ops.capture.emptiness import Reader
from moeblaze_ops.capture.guards import Unproven, loaded, stored
from moeblaze_ops.capture.host_counts import (
    Host,
    bincounts_of,
    counted_below,
    host,
    hosts_of,
    is_total,
    is_zero,
    numbers_on_device,
    split_sizes,
)
from moeblaze_ops.capture.splits.body import END, LIKE, ROWS, SIZE, START, Round
from moeblaze_ops.capture.splits.results import as_loop, as_tensor, collected_in, last_value
from moeblaze_ops.capture.trees.build import located, name_of, row_groups_call
from moeblaze_ops.capture.trees.syntax import is_path

_ENDS, _GROUP, _SPLIT = "_moeblaze_ends", "_moeblaze_group", "_moeblaze_split"


class Splits:
    """One pass over one function, whose tree it changes; loops whose lines are in ``refused`` or in ``others`` stay.

    After ``rewrite``, ``loops`` holds the loops that are changed, by the identity of their nodes.
    """

    def __init__(
        self, function: ast.FunctionDef, reader: Reader, refused: dict[int, str], others: set[int], cells: Sequence[str]
    ):
        self.function, self.reader, self.refused, self.others, self.cells = function, reader, refused, others, cells
        self.loops: dict[int, ast.For] = {}
        self._numbers: dict[str, ast.Assign] = {}  # names whose numbers stay on the device now, and where they are set
        self._own: set[int] = set()  # nodes that read them as a tensor

    def rewrite(self) -> bool:
        """Whether the tree is whole; otherwise there are more refused lines now, and it has to be made again."""
        before = len(self.refused)
        self._block(self.function.body, [], [])
        self._check_numbers()
        return len(self.refused) == before

    def refuse(self, loop: ast.stmt, reason: object) -> None:
        self.refused.setdefault(loop.lineno, f"the loop at line {loop.lineno} stays: {reason}")

    def _block(self, block: list[ast.stmt], above: list[ast.stmt], below: list[ast.stmt]) -> None:
        block[:] = [part for statement in block for part in _one_by_one(statement)]
        for statement in list(block):
            at = block.index(statement)
            before, after = [*above, *block[:at]], [*block[at + 1 :], *below]
            if statement.lineno in self.refused or statement.lineno in self.others:
                continue
            match statement:
                case ast.For():
                    block[at : at + 1] = self._loop(statement, before, after)
                case ast.Assign(targets=[ast.Name()], value=ast.ListComp(generators=[_])) if _SplitLoop(
                    self, statement, before, after
                ).counts():
                    start, loop, *rest = as_loop(statement, self.cells)
                    changed = self._loop(loop, [*before, start], after)
                    if changed == [loop]:
                        self.refuse(statement, "it may do something else as a loop")
                    self._own |= {id(node) for kept in rest for node in ast.walk(kept)}
                    block[at : at + 1] = [start, *changed, *rest]
                case ast.If() | ast.With():
                    for inner in (statement.body, getattr(statement, "orelse", [])):
                        self._block(inner, before, after)

    def _loop(self, loop: ast.For, above: list[ast.stmt], below: list[ast.stmt]) -> list[ast.stmt]:
        split = _SplitLoop(self, loop, above, below)
        if not split.counts() or loop.orelse:
            if sizes := self._sizes_from_outside(loop, above):
                self.refuse(loop, f"groups are as large as {sizes} says, an argument: only a whole graph tells what it counts")
            return [loop]
        try:
            return split.changed()
        except Unproven as unproven:
            self.refuse(loop, unproven)
            return [loop]

    def _sizes_from_outside(self, loop: ast.For, above: list[ast.stmt]) -> str | None:
        """The argument that says how large the groups are that a loop over experts takes."""
        arguments = {argument.arg for argument in self.function.args.args}
        items = [n for n in ast.walk(loop) if isinstance(n, ast.Subscript) and isinstance(n.slice, ast.Name)]
        numbered = {ast.unparse(n.value) for n in items if n.slice.id in stored(loop.target)}
        for statement in above:
            match statement:
                case ast.Assign(targets=[ast.Name(id=name)], value=value) if name in numbered and len(numbered) > 1:
                    sizes = split_sizes(value, self.reader.resolve)
                    if isinstance(sizes, ast.Name) and sizes.id in arguments:
                        return sizes.id
        return None

    def keep_on_device(self, name: str, found: Host) -> None:
        """Make a statement that copied numbers to the host, or split by them, one that leaves all as it was."""
        held = self.own(found.rows) if found.rows is not None else row_groups_call("kept", self.own(found.tensor))
        found.statement.value = located(held, found.statement)
        self._numbers[name] = found.statement

    def keep_padding(self, rows: ast.expr, sizes: ast.expr) -> None:
        """Zeros for rows that are in no group are there already, where a tensor has a row for each of ``rows``: add none."""
        for statement in ast.walk(self.function):
            match statement:
                case ast.Assign(
                    targets=[ast.Name(id=name)],
                    value=ast.BinOp(left=ast.Subscript(ast.Attribute(of, "shape"), at) as count, op=ast.Sub()) as rest,
                ) if is_total(rest.right, sizes, self.reader.resolve) and is_zero(at) and ast.dump(of) == ast.dump(rows):
                    if not loaded(rows) & stored(self.function) and _only_counts_zeros(name, self.function):
                        rest.right = located(copy.deepcopy(count), rest.right)

    def own(self, node: ast.expr) -> ast.expr:
        """A copy of ``node`` that may read numbers where they are."""
        node = copy.deepcopy(node)
        self._own |= {id(inner) for inner in ast.walk(node)}
        return node

    def reads_rows(self, loop: ast.For, names: set[str]) -> None:
        """In a changed loop what was split by numbers is whole."""
        self._own |= {id(node) for node in ast.walk(loop) if isinstance(node, ast.Name) and node.id in names}

    def _check_numbers(self) -> None:
        """Nothing else reads numbers that are no longer on the host."""
        functions = (n for n in ast.walk(self.function) if isinstance(n, ast.FunctionDef | ast.Lambda) and n is not self.function)
        nested = {id(node) for function in functions for node in ast.walk(function)}
        for node in ast.walk(self.function):
            if isinstance(node, ast.Name) and node.id in self._numbers and id(node) not in self._own:
                at = self._numbers[node.id]
                later = (node.lineno, node.col_offset) >= (at.end_lineno, at.end_col_offset)
                if later or id(node) in nested:
                    for loop in self.loops.values():
                        self.refuse(loop, f"{node.id} is also read at line {node.lineno}")


class _SplitLoop:
    """A loop that may be one over groups of rows."""

    def __init__(self, splits: Splits, loop: ast.stmt, above: Sequence[ast.stmt], below: Sequence[ast.stmt]):
        self.splits, self.loop, self.above, self.below = splits, loop, above, below
        self.resolve = splits.reader.resolve
        self.hosts = hosts_of(above, self.resolve)
        self.tensor: ast.expr | None = None  # the numbers of all groups
        self.indices: set[str] = set()
        self.number: str | None = None  # the loop's name for one of the numbers
        self.parts: dict[str, ast.expr] = {}  # the loop's names for slices, and of what
        self.split: list[ast.stmt] = []
        self.whole: set[str] = set()  # names of tuples of slices that the loop goes over
        self.others: list[ast.expr] = []
        self.counted: list[ast.Call] = []

    def counts(self) -> bool:
        """Whether numbers on the host have a part in it."""
        if loaded(self.loop) & self.hosts.keys():
            return True
        iterated = self.loop.iter if isinstance(self.loop, ast.For) else self.loop.value.generators[0].iter
        calls = [node for node in ast.walk(iterated) if isinstance(node, ast.Call)]
        return any(host(self.loop, call, self.hosts, self.resolve) is not None for call in calls)

    def changed(self) -> list[ast.stmt]:
        """What takes the place of the loop.

        Raises:
            Unproven: it may be another function.
        """
        loop = copy.deepcopy(self.loop)
        loop.target, loop.iter = self._header(loop.target, loop.iter)
        used = {name: self.hosts[name] for name in sorted(loaded(loop) & self.hosts.keys())}
        for name, found in used.items():
            self._counted_by(found.tensor if found.rows is not None or found.from_zero else ast.Name(name, ast.Load()))
        from_zero = {found.from_zero for found in used.values() if found.rows is None}
        if self.tensor is None or len(from_zero) > 1:
            raise Unproven(loop, "several lists of numbers")
        split = self.parts or any(found.rows is not None for found in used.values())
        kinds = [END] if True in from_zero else [SIZE] if split else [SIZE, END]
        failed: list[Unproven] = []
        for kind in kinds:
            trial = copy.deepcopy(loop)
            try:
                round_ = self._round(trial, kind, used, True in from_zero)
            except Unproven as unproven:
                failed.append(unproven)
                continue
            if not round_.taken:
                return [self.loop]  # it asks which groups are empty, and takes no slices: a matter of ``guards``
            self._check_after(round_)
            return self._statements(trial, round_, kind, used)
        raise failed[0]

    # The header.

    def _header(self, target: ast.expr, iterated: ast.expr) -> tuple[ast.expr, ast.expr]:
        """The target and what is iterated, with numbers of groups in the place of their sizes."""
        match target, iterated:
            case ast.Tuple(elts=[ast.Name(id=index), inner]), ast.Call(args=[over], keywords=[]) if (
                self._calls(iterated, enumerate)
            ):
                self.indices.add(index)
                target.elts[1], iterated.args[0] = self._header(inner, over)
            case ast.Tuple(elts=targets), ast.Call(args=overs) if self._calls(iterated, zip):
                if len(targets) != len(overs):
                    raise Unproven(iterated, "a zip of something else")
                pairs = [self._header(inner, over) for inner, over in zip(targets, overs, strict=True)]
                target.elts, iterated.args = map(list, zip(*pairs, strict=True))
            case ast.Name(id=index), ast.Call(args=[size], keywords=[]) if self._calls(iterated, range):
                self.indices.add(index)
                match size:
                    case ast.Call(args=[of], keywords=[]) if self._calls(size, len) and self._numbers(of) is not None:
                        self._counted_by(self._numbers(of))
                        return target, self._groups(iterated)
            case ast.Name(id=name), _ if (tensor := self._numbers(iterated)) is not None:
                self._counted_by(tensor)
                self.number = name
                return located(ast.Name(_GROUP, ast.Store()), target), self._groups(iterated)
            case ast.Name(id=name), _ if (rows := self._split_rows(iterated)) is not None:
                self.parts[name] = rows
                return located(ast.Name(_GROUP, ast.Store()), target), self._groups(iterated)
            case _:
                self.others.append(iterated)
        return target, iterated

    def _calls(self, e: ast.expr, function: object) -> bool:
        return isinstance(e, ast.Call) and self.resolve(e.func) is function

    def _numbers(self, e: ast.expr) -> ast.expr | None:
        return numbers_on_device(e, self.hosts, self.resolve)

    def _split_rows(self, e: ast.expr) -> ast.expr | None:
        """What the iterated parts are of."""
        if isinstance(e, ast.Name):
            found, rows = self.hosts.get(e.id), e
        else:
            found = host(self.loop, e, self.hosts, self.resolve)
            rows = ast.Name(f"{_SPLIT}_{len(self.split)}", ast.Load())
        if found is None or found.rows is None:
            return None
        if rows is not e:
            self.split.append(ast.Assign([ast.Name(rows.id, ast.Store())], copy.deepcopy(found.rows)))
        else:
            self.whole.add(e.id)
        self._counted_by(found.tensor)
        return rows

    def _counted_by(self, tensor: ast.expr) -> None:
        if self.tensor is not None and ast.dump(self.tensor) != ast.dump(tensor):
            raise Unproven(self.loop, "several lists of numbers")
        self.tensor = tensor

    def _groups(self, place: ast.expr) -> ast.expr:
        call = located(ast.Call(name_of("range"), [name_of(_ENDS)], []), place)
        if self.resolve(call.func) is not range or self.resolve(name_of("len")) is not len:
            raise Unproven(place, "range or len is another function here")
        self.counted.append(call)
        return call

    def _num_groups(self, loop: ast.For) -> ast.expr:
        """How many groups there are: as many as numbers.

        Where the data say how many numbers there are, it is as many as experts, or as a ``bincount`` gives at least.
        """
        bincounts = bincounts_of(self.tensor, self.above)
        if bincounts:
            for of in (*self.others, *self._indexed(loop)):
                return ast.Call(name_of("len"), [self.splits.own(of)], [])
        if len(bincounts) == 1 and (counted := counted_below(*bincounts, self.resolve)) is not None:
            call = located(row_groups_call("counts", *counted), *bincounts)
            bincounts[0].func, bincounts[0].args, bincounts[0].keywords = call.func, call.args, []
        return ast.Subscript(ast.Attribute(name_of(_ENDS), "shape", ast.Load()), ast.Constant(0), ast.Load())

    def _indexed(self, loop: ast.For) -> Iterator[ast.expr]:
        """What a round takes its own item of."""
        for node in ast.walk(loop):
            match node:
                case ast.Subscript(value=of, slice=ast.Name(id=index)) if index in self.indices and is_path(of):
                    if not loaded(of) & stored(loop):
                        yield of

    # The body.

    def _round(self, loop: ast.For, kind: tuple, used: dict[str, Host], from_zero: bool) -> Round:
        """Go through a round of ``loop`` and change its body."""
        set_inside = set().union(*(stored(s) for s in loop.body))
        running = frozenset(name for name in set_inside if last_value(self.above, name, is_zero))
        round_ = Round(
            resolve=self.resolve,
            indices=frozenset(self.indices - set_inside),
            numbers={name: kind for name, found in used.items() if found.rows is None},
            from_zero=from_zero,
            parts={name: name_of(name) for name, found in used.items() if found.rows is not None},
            lists=collected_in(loop, self.above),
            values=dict.fromkeys(running, START) | ({self.number: kind} if self.number else {}),
            running=running,
        )
        if from_zero and self.number:
            raise Unproven(loop, "a list of bounds has one more than there are groups")
        heads = [
            located(ast.Assign([ast.Name(name, ast.Store())], round_.taken_from(rows, loop)), loop)
            for name, rows in self.parts.items()
        ]
        body = round_.block(loop.body, certain=True)
        round_.finish(loop)
        loop.body = heads + body
        return round_

    def _check_after(self, round_: Round) -> None:
        gone = set(round_.values)
        for statement in self.below:
            if isinstance(statement, ast.Assign) and len(gone & stored(statement)):
                gone -= stored(statement) - loaded(statement)
            if names := gone & loaded(statement):
                raise Unproven(statement, f"{', '.join(sorted(names))} is read after the loop")
        for name in round_.appended:
            as_tensor(name, self.above, self.below, self.resolve)

    def _statements(self, loop: ast.For, round_: Round, kind: tuple, used: dict[str, Host]) -> list[ast.stmt]:
        set_inside = stored(loop)
        fixed = [of for of in round_.taken if isinstance(of, ast.Name) and of.id not in set_inside]
        index = _GROUP if self.counted else next(iter(round_.indices), None)
        if not fixed or index is None:
            raise Unproven(loop, "it takes no rows of one tensor")
        size = self._num_groups(loop)
        for node in ast.walk(loop.iter):
            match node:
                case ast.Call(args=[ast.Name(id=name)]) if name == _ENDS:
                    node.args = [located(copy.deepcopy(size), loop)]
        for name in self._copied({*used, *self.whole, *loaded(self.tensor)}):
            if (rows := self.hosts[name].rows) is not None:
                self.splits.keep_padding(rows, self.hosts[name].tensor)
            self.splits.keep_on_device(name, self.hosts[name])
        self.splits.reads_rows(loop, self.whole | {name for name, found in used.items() if found.rows is not None})
        ends = self.splits.own(self.tensor)
        if kind is SIZE:
            ends = ast.Call(ast.Attribute(ends, "cumsum", ast.Load()), [ast.Constant(0)], [])
        rows = row_groups_call("rows", name_of(_ENDS), name_of(index), name_of(LIKE))
        loop.body.insert(0, ast.Assign([ast.Name(ROWS, ast.Store())], rows))
        before = [
            *self.split,
            ast.Assign([ast.Name(LIKE, ast.Store())], self.splits.own(fixed[0])),
            ast.Assign([ast.Name(_ENDS, ast.Store())], ends),
        ]
        self.splits.loops[id(loop)] = loop
        return [located(statement, self.loop) for statement in (*before, loop)]

    def _copied(self, names: set[str]) -> set[str]:
        """Those of ``names`` that were copied to the host, and what they were computed from there."""
        found: set[str] = set()
        while new := (names & self.hosts.keys()) - found:
            found |= new
            names = set().union(*(loaded(self.hosts[name].tensor) for name in new))
        return found


def _only_counts_zeros(name: str, function: ast.FunctionDef) -> bool:
    """Whether a name is set once, and read once: for how many rows of zeros there are."""
    named = [node for node in ast.walk(function) if isinstance(node, ast.Name) and node.id == name]
    rows = []
    for node in ast.walk(function):
        match node:
            case ast.Call(func=ast.Attribute(attr="new_zeros"), args=[ast.Tuple(elts=[ast.Name(id=first) as count, *_])]):
                rows += [count] if first == name else []
    return len(named) == 2 and len(rows) == 1


def _one_by_one(s: ast.stmt) -> list[ast.stmt]:
    """``a, b = 0, []`` as two statements."""
    match s:
        case ast.Assign(targets=[ast.Tuple(elts=names)], value=ast.Tuple(elts=values)) if len(names) == len(values):
            if all(isinstance(name, ast.Name) for name in names) and not stored(s) & loaded(s) and len(stored(s)) == len(names):
                return [ast.copy_location(ast.Assign([n], v), s) for n, v in zip(names, values, strict=True)]
    return [s]
