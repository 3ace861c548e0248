"""What is in a saved_model.pb, read as a message: nothing is built, nothing runs.

`DANGEROUS` lists operations of TensorFlow that reach outside the graph. Finding none is a guard against accidents and
simple attacks; it is not a sandbox, and an export from a stranger is still a program of a stranger.
"""

import dataclasses
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

import tensorflow as tf
from google.protobuf import message
from tensorflow.core.framework import node_def_pb2
from tensorflow.core.protobuf import meta_graph_pb2, saved_model_pb2

from models.errors import InputError

# What an operation does that no export needs -> its names, as regular expressions of the whole name.
DANGEROUS = {
    "reads or writes files": """
        ReadFile WriteFile MatchingFiles PrintV2 FileSystemSetConfiguration RecordInput Skipgram
        Save SaveSlices SaveV2 Restore RestoreSlice RestoreV2 MergeV2Checkpoints
        LoadAndRemapMatrix GenerateVocabRemapping InitializeTableFromTextFile(V2)? FixedUnigramCandidateSampler
        .*Reader(V2)? Reader.* .*SnapshotDatasetReader .*DatasetToTFRecord EncodeProto DecodeProtoV2
        .*(TextLine|TFRecord|FixedLengthRecord|CSV|LMDB|Sql|Snapshot|Cache|Load|Save|MatchingFiles).*Dataset.*
        CreateSummary.*Writer SummaryWriter Write.*Summary ImportEvent Debug(Identity|NanCount|NumericSummary).*
    """,
    "uses the network": """
        RemoteCall Send Recv Rpc.* .*DataService.* .*RegisterDataset.* DistributedSave Collective.* Nccl.*
        .*DistributedTPU
    """,
    "runs Python": "PyFunc PyFuncStateless EagerPyFunc",
}
PATTERNS = {reason: re.compile("|".join(names.split())) for reason, names in DANGEROUS.items()}
# Of those, what every SavedModel has for its own variables; nothing else may call them.
OF_THE_SAVER = {"SaveV2", "RestoreV2", "MergeV2Checkpoints"}


@dataclasses.dataclass(frozen=True)
class Graph:
    """One SavedModel's graph for servers."""

    meta: meta_graph_pb2.MetaGraphDef
    functions: dict[str, object]  # name -> FunctionDef

    def nodes(self) -> Iterator[tuple[str, node_def_pb2.NodeDef]]:
        """All nodes as (where, node), where being a function's name, or "" outside of functions."""
        for node in self.meta.graph_def.node:
            yield "", node
        for name, function in self.functions.items():
            for node in function.node_def:
                yield name, node

    def reachable(self, tensors: Iterable[str]) -> set[tuple[str, str]]:
        """What computing these tensors may run: (where, node name); of a function all nodes, needed or not."""
        by_name = {node.name: node for node in self.meta.graph_def.node}
        waiting, found, called = [_node_name(tensor) for tensor in tensors], set(), []
        while waiting:
            name = waiting.pop()
            if name in by_name and ("", name) not in found:
                found.add(("", name))
                waiting += [_node_name(tensor) for tensor in by_name[name].input]
                called += self.calls(by_name[name])
        seen = set()
        while called:
            name = called.pop()
            if name not in seen:
                seen.add(name)
                for node in self.functions[name].node_def:
                    found.add((name, node.name))
                    called += self.calls(node)
        return found

    def calls(self, node: node_def_pb2.NodeDef) -> list[str]:
        """Names of the functions that a node calls itself."""
        names = [node.op]
        for value in node.attr.values():
            names += [value.func.name, *(function.name for function in value.list.func)]
        return [name for name in names if name in self.functions]


def _node_name(tensor: str) -> str:
    return tensor.removeprefix("^").split(":")[0]


def read(saved_model: Path) -> Graph:
    """The graph tagged for servers. Raises InputError where there is none."""
    path = saved_model / "saved_model.pb"
    try:
        parsed = saved_model_pb2.SavedModel.FromString(path.read_bytes())
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror})") from error
    except message.DecodeError as error:
        raise InputError(f"{path}: not a SavedModel ({error})") from error
    tagged = [meta for meta in parsed.meta_graphs if set(meta.meta_info_def.tags) == {tf.saved_model.SERVING}]
    if len(tagged) != 1:
        raise InputError(f"{path}: has {len(tagged)} graphs with the tag {tf.saved_model.SERVING!r}, one expected")
    [meta] = tagged
    return Graph(meta, {function.signature.name: function for function in meta.graph_def.library.function})


def danger(op: str) -> str | None:
    """What an operation does that an export must not, or None."""
    for reason, pattern in PATTERNS.items():
        if pattern.fullmatch(op):
            return reason
    return None if hasattr(tf.raw_ops, op) else "is none of TensorFlow's public operations"


def dangers(graph: Graph) -> list[tuple[str, str]]:
    """(operation, what it does) of all that an export must not hold, once each, in order of name.

    Operations of the saver are fine where only saving and restoring variables leads to them.
    """
    saver = graph.meta.saver_def
    save = graph.reachable((saver.filename_tensor_name, saver.save_tensor_name, saver.restore_op_name))
    served = graph.reachable(
        t.name for s in graph.meta.signature_def.values() for t in (*s.inputs.values(), *s.outputs.values())
    )
    found = {}
    for where, node in graph.nodes():
        place = (where, node.name)
        if node.op in OF_THE_SAVER and place in save and place not in served:
            continue
        # A function may be called anything, a name of TensorFlow's too.
        reason = danger(node.op) if hasattr(tf.raw_ops, node.op) or node.op not in graph.functions else None
        if reason:
            found[node.op] = reason
    return sorted(found.items())
