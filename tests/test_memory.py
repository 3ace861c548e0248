"""Exported models are freed: the next part must not come on top of the last one's weights."""

import gc

import tensorflow as tf

from models.layers import ResnetBlock


def held_variables():
    """Handles of variables that anything still holds."""
    gc.collect()
    return sum(type(o).__name__ == "EagerTensor" and o.dtype == tf.resource for o in gc.get_objects())


def trace_and_forget():
    layer = ResnetBlock("block", 4, 8, 2, 1e-5, "float32")
    function = tf.function(lambda x: layer(x), autograph=False)
    function.get_concrete_function(tf.TensorSpec((1, 4, 4, 4), tf.float32))
    return held_variables()


def test_a_traced_layer_is_freed():
    before = held_variables()
    assert trace_and_forget() - before == 10
    assert held_variables() == before
