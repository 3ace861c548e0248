"""Counts over the operations of a TensorFlow graph; `pipeline.cost` says what they mean.

A graph is what `as_graph_def(add_shapes=True)` gives, which is also what a SavedModel stores: nodes, functions, and the
shapes of all tensors. Functions are counted where they are called, branches as if the dearer one ran, loops as often as
their `maximum_iterations` says; what a loop without such a number does is counted once, apart from the rest.
"""

import collections
import dataclasses
import math

import tensorflow as tf
from tensorflow.python.framework import op_def_registry

from models.config import InputError

CALLS, LOOPS = {"PartitionedCall", "StatefulPartitionedCall"}, {"While", "StatelessWhile"}
BRANCHES = {"If", "StatelessIf"}
SOURCES = {"Placeholder", "Const", "ReadVariableOp", "VarHandleOp"}  # whose memory is not that of activations
ALIASES = {"Identity", "Reshape", "Squeeze", "ExpandDims", "StopGradient", "EnsureShape"}  # the input by another name
SLICES = {"GatherV2", "Slice", "StridedSlice"}  # read no more than they write
LAYOUT = SLICES | {
    *("Transpose", "ConcatV2", "Pad", "PadV2", "Split", "SplitV", "Tile", "BroadcastTo", "Pack", "Unpack", "Fill"),
    *("Shape", "Range", "ZerosLike", "OnesLike", "TensorListReserve", "TensorListFromTensor", "TensorListStack"),
    *("TensorListGetItem", "TensorListSetItem"),  # a list has no size of its own here
}
REDUCTIONS = {"Mean", "Sum", "Max", "Min", "Prod", "All", "Any", "ArgMax", "ArgMin"}
MATMULS = {"MatMul", "BatchMatMul", "BatchMatMulV2", "BatchMatMulV3"}
PRODUCTS = MATMULS | {"Conv2D"}
# Parts of names of operations that would be far too cheap as element-wise ones.
UNKNOWN = ("Conv", "MatMul", "Einsum", "Attention", "ResourceGather")


@dataclasses.dataclass(frozen=True)
class _Tensor:
    where: str  # for messages
    sizes: tuple[int, ...]  # below 0: not known
    dtype: str
    item: int  # bytes of one number; 0 of what is none

    @property
    def shape(self) -> tuple[int, ...]:
        if min(self.sizes, default=0) < 0:
            raise InputError(f"{self.where}: has no fixed shape, so its cost cannot be counted")
        return self.sizes

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    @property
    def bytes(self) -> int:
        return self.elements * self.item


@dataclasses.dataclass(frozen=True)
class Counted:
    """A body of operations: (kind, dtype) and names of bytes -> counts, outside and inside the loop; peak bytes."""

    once: collections.Counter
    row: collections.Counter
    peak: int


class Library:
    """The functions of one graph, each counted once."""

    def __init__(self, graph_def):
        self.functions = {function.signature.name: function for function in graph_def.library.function}
        self.counted: dict[str, Counted] = {}

    def function(self, name: str) -> Counted:
        if name not in self.counted:
            function = self.functions[name]
            shapes = function.attr["_input_shapes"].list.shape
            tensors = {
                (argument.name, 0): _tensor(f"{name}: {argument.name}", shape, argument.type)
                for argument, shape in zip(function.signature.input_arg, shapes, strict=True)
            }
            outputs = [function.ret[output.name] for output in function.signature.output_arg]
            self.counted[name] = self.body(name, function.node_def, tensors, outputs)
        return self.counted[name]

    def body(self, where: str, node_defs, arguments: dict, outputs: list[str]) -> Counted:
        """Count what the outputs need of a graph or a function's body."""
        body = _Body(where, arguments)
        for node in _ordered(node_defs, arguments, outputs):
            body.add(node, self.called(body, node))
        return body.counted(outputs)

    def called(self, body: "_Body", node) -> Counted:
        """What runs inside a node."""
        if node.op in CALLS:
            return self.function(node.attr["f"].func.name)
        if node.op in BRANCHES:
            # As if the dearer one ran.
            branches = [self.function(node.attr[name].func.name) for name in ("then_branch", "else_branch")]
            return max(branches, key=lambda branch: (sum(branch.once.values()), branch.peak))
        if node.op in LOOPS:
            parts = [self.function(node.attr[name].func.name) for name in ("cond", "body")]
            if any(part.row for part in parts):
                message = f"{node.name} is a loop around another, and how often that one runs is not in the graph"
                raise InputError(f"{body.where}: {message}")
            turn, peak = parts[0].once + parts[1].once, max(part.peak for part in parts)
            times = body.times(node)
            if times is None:
                return Counted(collections.Counter(), turn, peak)
            return Counted(
                collections.Counter({key: n * times for key, n in turn.items()}), collections.Counter(), peak
            )
        return Counted(collections.Counter(), collections.Counter(), 0)


class _Body:
    """Counts operations one after the other; tensors are known by (name of the node, number of the output)."""

    def __init__(self, where: str, arguments: dict):
        self.where = where
        self.tensors = dict(arguments)
        self.names: dict[str, list[str]] = {}  # node -> names of its outputs, one per tensor
        self.buffer = dict.fromkeys(arguments)  # tensor -> the tensor whose memory it has; None: no activation's
        self.variable: dict = {}  # tensor -> the read of the variable that it is
        self.made_of_weights: set = set()  # tensors that no input of the function changes
        self.from_softmax: set = set()
        self.constants: dict = {}  # tensor -> its node
        self.producer: dict = {}  # tensor -> (operation, its inputs) that made it
        self.read: set = set()  # variables that are read as a whole
        self.once, self.row = collections.Counter(), collections.Counter()
        self.steps: list = []  # buffers read, bytes written per buffer, peak inside, whether in place

    def add(self, node, inner: Counted) -> None:
        ins = [self.find(reference) for reference in node.input if not reference.startswith("^")]
        outs = self.outputs(node)
        self.tensors |= outs
        self.producer |= dict.fromkeys(outs, (node.op, ins))
        self.once += inner.once
        self.row += inner.row
        called = node.op in CALLS | LOOPS | BRANCHES
        if node.op == "Const":
            self.constants |= dict.fromkeys(outs, node)
        if node.op == "ReadVariableOp":
            self.variable |= {key: key for key in outs}
        constant = node.op not in ("Placeholder", "VarHandleOp") and self.made_of_weights.issuperset(ins)
        if node.op == "ReadVariableOp" or (constant and not called):
            self.made_of_weights.update(outs)
        if node.op == "Softmax":
            self.softmax(ins[0])
            self.from_softmax.update(outs)
        elif node.op not in PRODUCTS and not called and self.from_softmax.intersection(ins):
            self.from_softmax.update(outs)
        if node.op in ALIASES | SOURCES:
            alias = node.op in ALIASES
            self.buffer |= dict.fromkeys(outs, self.buffer[ins[0]] if alias else None)
            self.variable |= {key: self.variable[ins[0]] for key in outs if alias and ins[0] in self.variable}
            return
        self.buffer |= {key: key for key in outs}
        in_place = not called and node.op not in PRODUCTS | LAYOUT | REDUCTIONS
        self.steps.append((ins, {key: tensor.bytes for key, tensor in outs.items()}, inner.peak, in_place))
        if not called:
            self.work(node, ins, outs)

    def work(self, node, ins: list, outs: dict) -> None:
        """FLOPs and bytes of one operation."""
        if node.op not in PRODUCTS and any(part in node.op for part in UNKNOWN):
            raise InputError(f"{self.where}: {node.name}: no rule to count the FLOPs of {node.op}")
        operands = [self.tensors[key] for key in ins]
        written = sum(tensor.bytes for tensor in outs.values())
        activations = [key for key in ins[:2] if key not in self.made_of_weights]
        kind, flops = _flops(node, operands, list(outs.values()))
        if node.op in MATMULS and len(activations) == 2:
            kind = "attention"
        computed = operands if node.op in PRODUCTS else list(outs.values())
        self.once[kind, computed[0].dtype] += flops
        for key in dict.fromkeys(ins):
            sliced = node.op in SLICES and key == ins[0]
            size = min(written, self.tensors[key].bytes) if sliced else self.tensors[key].bytes
            if key not in self.variable:
                self.once["moved"] += size
            elif sliced:
                self.once["weights"] += size
            else:
                self.read.add(self.variable[key])
        self.once["moved"] += written
        if node.op in PRODUCTS:
            kept = [key for key in dict.fromkeys(activations) if key not in self.from_softmax]
            self.once["fused"] += written + sum(self.tensors[key].bytes for key in kept)

    def softmax(self, key) -> None:
        """The product that a softmax is of stays where it is computed."""
        while key in self.producer:
            op, ins = self.producer[key]
            varying = [each for each in ins if each not in self.made_of_weights]
            if op in MATMULS and len(varying) == 2:
                self.once["fused"] -= self.tensors[key].bytes
            same = [each for each in varying if self.tensors[each].elements == self.tensors[key].elements]
            if op in PRODUCTS | CALLS | LOOPS | BRANCHES or not same:
                return
            key = same[0]

    def outputs(self, node) -> dict:
        names, types = [], []
        definition = op_def_registry.get(node.op)
        # An export leaves out what is as by default.
        attributes = {attr.name: attr.default_value for attr in definition.attr} | dict(node.attr)
        for output in definition.output_arg:
            if output.type_list_attr:
                found = list(attributes[output.type_list_attr].list.type)
            else:
                count = attributes[output.number_attr].i if output.number_attr else 1
                found = [output.type or attributes[output.type_attr].type] * count
            names += [output.name] * len(found)
            types += found
        self.names[node.name] = names
        shapes = node.attr["_output_shapes"].list.shape[: len(types)]
        where = f"{self.where}: {node.name} ({node.op})"
        found = [_tensor(where, shape, dtype) for shape, dtype in zip(shapes, types, strict=True)]
        return {(node.name, i): tensor for i, tensor in enumerate(found)}

    def find(self, reference: str) -> tuple[str, int]:
        """NODE, NODE:NUMBER or, in functions, NODE:NAME:NUMBER of an output."""
        node, *rest = reference.split(":")
        number = int(rest[-1]) if rest else 0
        return (node, self.names[node].index(rest[0]) + number) if len(rest) == 2 else (node, number)

    def times(self, loop) -> int | None:
        """How often a loop runs at most, which is how often those with a limit do; None: the graph has no limit."""
        limit = self.constants.get(self.find(loop.input[1]))
        count = -1 if limit is None else tf.make_ndarray(limit.attr["value"].tensor).item()
        return count if count >= 0 else None

    def counted(self, outputs: list[str]) -> Counted:
        """The sums, once all operations are added."""
        self.once["weights"] += sum(self.tensors[key].bytes for key in self.read)
        last = {self.buffer[key]: i for i, (ins, *_) in enumerate(self.steps) for key in ins}
        last |= {self.buffer[self.find(reference)]: len(self.steps) for reference in outputs}
        dying = collections.defaultdict(list)
        sizes = {key: size for _, written, *_ in self.steps for key, size in written.items()}
        for i, (_, written, *_) in enumerate(self.steps):
            for key in written:
                dying[last.get(key, i)].append(key)
        live = peak = 0
        for i, (_, written, inner, in_place) in enumerate(self.steps):
            new = sum(written.values())
            reused = new if in_place and any(sizes[key] == new for key in dying[i] if key not in written) else 0
            peak = max(peak, live + new - reused, live + inner)
            live += new - sum(sizes[key] for key in dying[i])
        return Counted(self.once, self.row, peak)


def _flops(node, operands: list[_Tensor], outs: list[_Tensor]) -> tuple[str, int]:
    numbers = sum(tensor.elements for tensor in outs)
    if node.op == "Conv2D":
        return "convolution", 2 * numbers * math.prod(operands[1].shape[:3])
    if node.op in MATMULS:
        transposed = node.attr["transpose_a" if node.op == "MatMul" else "adj_x"].b
        return "matmul", 2 * numbers * operands[0].shape[-2 if transposed else -1]
    if node.op in LAYOUT:
        return "rest", 0
    return "rest", operands[0].elements if node.op in REDUCTIONS else numbers


def _tensor(where: str, shape, dtype: int) -> _Tensor:
    kind = tf.as_dtype(dtype)
    numeric = kind.is_floating or kind.is_integer or kind.is_bool
    sizes = (-1,) if shape.unknown_rank else tuple(dimension.size for dimension in shape.dim)
    return _Tensor(where, sizes if numeric else (), kind.name, kind.size if numeric else 0)


def _ordered(node_defs, arguments: dict, outputs: list[str]) -> list:
    """The nodes that the outputs need, in their own order as far as inputs come first."""
    nodes = {node.name: node for node in node_defs}
    needed, stack = set(), [reference.split(":")[0] for reference in outputs]
    while stack:
        name = stack.pop()
        if name in nodes and name not in needed:
            needed.add(name)
            stack += _inputs(nodes[name])
    done, order = {name for name, _ in arguments}, []
    waiting = [node for name, node in nodes.items() if name in needed]
    while waiting:
        later = []
        for node in waiting:
            if done.issuperset(_inputs(node)):
                order.append(node)
                done.add(node.name)
            else:
                later.append(node)
        waiting = later
    return order


def _inputs(node) -> list[str]:
    return [reference.split(":")[0] for reference in node.input if not reference.startswith("^")]
