"""What the functions of an export cost, counted from their graphs: FLOPs, bytes moved, peak memory of activations.

Nothing runs and no weights are read or made: an export's graphs, or the same traced from a configuration, tell every
operation with the shapes of its tensors. `pipeline.roofline` makes times of the counts.

What is counted, per call, or per row of the steps table for what is inside the denoising loop:

    FLOPs       a multiply-add is 2. "convolution"; "matmul" with weights; "attention", products of two activations;
                "rest": one per number written, or read by a reduction.
    weights     bytes of the weights as stored, read once; of a table that is looked up in, the rows taken.
    moved       bytes of activations where every operation reads its inputs and writes its outputs: a plain graph.
    fused       the same where only convolutions and products move any, and attention keeps its logits to itself (Dao
                et al. 2022, arXiv:2205.14135): about the least that a compiler can do.
    peak        bytes of live activations and inputs, operations one by one as traced, tensors freed after their last
                use, element-wise operations in place where they can be. No weights, no workspace of convolutions.
"""

import collections
import contextlib
import dataclasses
import math
from collections.abc import Sequence

import numpy as np
import tensorflow as tf
from tensorflow.python.ops.resource_variable_ops import UninitializedVariable

from models.config import ExportSpec, InputError, ModelConfig, Size
from pipeline import export, manifest, sources
from pipeline.count import Counted, Library
from pipeline.roofline import KINDS
from pipeline.serving import graph

# Counted functions, and the part that each is in.
FUNCTIONS = {
    **{"encode": "text_encoder", "unet": "diffusion_model", "denoise": "diffusion_model", "decode": "decoder"},
    **manifest.OPTIONAL,
}
LOOP = "denoise"  # the one with a loop


@dataclasses.dataclass(frozen=True)
class Cost:
    """What one call of a function costs, or one row of its loop; see the module."""

    flops: dict[str, dict[str, int]]  # of KINDS -> dtype computed in -> operations
    weights: int  # bytes
    moved: int
    fused: int
    peak: int

    def total(self, *kinds: str) -> int:
        """FLOPs of these kinds, all if none is named."""
        return sum(sum(self.flops[kind].values()) for kind in kinds or KINDS)


def of_export(contract: manifest.Manifest, size: Size) -> dict[str, Cost]:
    """Costs of an export's functions at one of its sizes, from the graphs it stores.

    Returns:
        encode, unet, "denoise once", "denoise per row", decode, where there is one encode_image -> Cost.

    Raises:
        InputError: SavedModels that cannot be read, or a graph that cannot be counted.
    """
    found, libraries = {}, {}
    for name in (name for name, part in FUNCTIONS.items() if part in contract.signatures):
        part = FUNCTIONS[name]
        path = contract.path(part)
        if part not in libraries:
            meta = graph.read(path).meta
            libraries[part] = meta, Library(meta.graph_def)
        meta, library = libraries[part]
        signature = name if part == "text_encoder" else contract.spec.signature(name, size)
        outputs = [info.name for info in meta.signature_def[signature].outputs.values()]
        counted = library.body(f"{path}: {signature}", meta.graph_def.node, {}, outputs)
        found |= _costs(name, counted, contract.signatures[part][signature].inputs)
    return found


def of_config(config: ModelConfig, spec: ExportSpec, functions: Sequence[str] = tuple(FUNCTIONS)) -> dict[str, Cost]:
    """The same of the export that a configuration would make: traced as an export is, but with no weights at all.

    Args:
        functions: of FUNCTIONS, those to count.

    Raises:
        InputError: a size, count or dtype that cannot be exported.
    """
    spec.check(config)
    source = sources.Source(config.family, config, sources.CLIP_VOCABULARY, fill=lambda component, layers: [])
    no_tokens = np.zeros(config.text_encoder.max_position_embeddings, "int32")
    found = {}
    # What building says is about weights.
    with contextlib.redirect_stdout(None), tf.variable_creator_scope(_without_value):
        for part, build in export.builders(source, spec, no_tokens, image_encoder=True).items():
            wanted = [name for name in functions if FUNCTIONS[name] == part]
            for endpoint in build()[1] if wanted else ():
                if endpoint.name in wanted:
                    found |= of_function(endpoint.name, export.concrete_function(endpoint))
    return found


def _without_value(next_creator, initial_value, **options):
    """What tf.Variable makes here: a shape and a type, and no memory."""
    with tf.Graph().as_default():
        shape = initial_value().shape
    return UninitializedVariable(**options | {"shape": shape})


def of_function(name: str, concrete) -> dict[str, Cost]:
    """Costs of a concrete function under its name; of one called `LOOP`, outside its loop and per row."""
    traced = concrete.graph.as_graph_def(add_shapes=True)
    counted = Library(traced).body(name, traced.node, {}, [tensor.name for tensor in concrete.outputs])
    return _costs(name, counted, tf.nest.flatten(concrete.structured_input_signature))


def _costs(name: str, counted: Counted, inputs: Sequence) -> dict[str, Cost]:
    if counted.row and name != LOOP:
        raise InputError(f"{name}: has a loop, and how often it runs is not in the graph; only {LOOP}'s can be counted")
    peak = counted.peak + sum(math.prod(spec.shape) * tf.as_dtype(spec.dtype).size for spec in inputs)
    if name != LOOP:
        return {name: _cost(counted.once, peak)}
    return {f"{name} once": _cost(counted.once, peak), f"{name} per row": _cost(counted.row, peak)}


def _cost(counts: collections.Counter, peak: int) -> Cost:
    flops = {kind: {key[1]: n for key, n in counts.items() if key[0] == kind and n} for kind in KINDS}
    return Cost(flops, *(counts[name] for name in ("weights", "moved", "fused")), peak=peak)
