"""Complete lists of public checkpoints' tensors: every key maps, every variable is filled; no weights are allocated.

The lists and who wrote them: tests/checkpoint_keys/write.py.
"""

import types

import numpy as np
import pytest

from models.families import FAMILIES
from pipeline.checkpoints import kerascv_h5, keymaps, loader
from pipeline.checkpoints import single_file as ldm

# As many tensors as the published files have; fused ones of the single files count once.
COUNTS = {
    "sd1": {"text_encoder": 196, "unet": 686, "vae": 248},
    "sd2": {"text_encoder": 372, "unet": 686, "vae": 248},
    "sdxl": {"text_encoder": 196, "text_encoder_2": 517, "unet": 1680, "vae": 248},
}
LDM_COUNTS = {"sd1": 1131, "sd2": 1228, "sdxl": 2515}


def shape_of(written: str) -> tuple[int, ...]:
    return () if written == "scalar" else tuple(map(int, written.split("x")))


def numbered(shape: tuple[int, ...]) -> np.ndarray:
    """Each row holds its own number; takes the memory of one column."""
    return np.broadcast_to(np.arange(shape[0]).reshape(-1, *[1] * (len(shape) - 1)), shape)


def tensor(shape: tuple[int, ...], dtype="float32") -> loader.Tensor:
    return loader.Tensor(shape, np.dtype(dtype), lambda: numbered(shape))


@pytest.fixture(scope="module", params=FAMILIES)
def family(request):
    return request.param


@pytest.fixture(scope="module")
def variables(family, variable_shapes):
    """Component -> {LAYER.VARIABLE: its shape} of the full-size model."""
    return {
        component: {path.replace("/", "."): types.SimpleNamespace(shape=shape) for path, shape in shapes.items()}
        for component, shapes in variable_shapes(FAMILIES[family]).items()
    }


def assert_total(variables, config, component, source, ignored=()):
    """Every tensor fills a variable or is ignored, every variable is filled."""
    keymap = keymaps.of_component(component, config)
    assignments, left_out, problems = loader.plan(variables[component], source, keymap)
    assert not problems
    assert set(left_out) == set(ignored)
    assert assignments.keys() == variables[component].keys()
    assert {key for key, _ in assignments.values()} == source.keys() - set(left_out)


def unused_layers(checkpoint_list, family: str, component: str, prefix: str = "") -> set[str]:
    """Stable Diffusion XL's context is what goes into its first encoder's last layer."""
    if (family, component) != ("sdxl", "text_encoder"):
        return set()
    names = [row[0] for row in checkpoint_list("sdxl.diffusers")["text_encoder"][1]]
    unused = {prefix + name for name in names if name.startswith(("encoder.layers.11.", "final_layer_norm."))}
    assert len(unused) == 18
    return unused


def test_diffusers_folders(checkpoint_list, family, variables):
    sections = checkpoint_list(f"{family}.diffusers")
    assert {component: len(rows) for component, (_, rows) in sections.items()} == COUNTS[family]
    for component, (_, rows) in sections.items():
        source = {name: tensor(shape_of(shape)) for name, shape in rows}
        assert_total(variables, FAMILIES[family], component, source, unused_layers(checkpoint_list, family, component))


def single_file(checkpoint_list, family: str) -> dict[str, loader.Tensor]:
    return {
        prefix + row[0]: tensor(shape_of(row[1]), "int64" if row[0].endswith("position_ids") else "float32")
        for prefix, rows in checkpoint_list(f"{family}.ldm").values()
        for row in rows
    }


def test_single_files(checkpoint_list, family, variables):
    """The family's config from keys and shapes; each tensor goes where diffusers' converter puts it, and fills."""
    tensors = single_file(checkpoint_list, family)
    assert len(tensors) == LDM_COUNTS[family]
    read = ldm.read(tensors, family)
    assert read.config == FAMILIES[family]
    used = set()
    for component, (prefix, rows) in checkpoint_list(f"{family}.ldm").items():
        found = read.tensors[component]
        published = "text_model." if prefix.endswith(".transformer.") else ""
        assert_total(
            variables, read.config, component, found, unused_layers(checkpoint_list, family, component, published)
        )
        expected = {row[3]: row for row in rows if row[3] != "-"}
        used |= {prefix + row[0] for row in expected.values()}
        assert {name.removeprefix("text_model.") for name in found} == {n.removeprefix("text_model.") for n in expected}
        for target, (name, shape, _, _, *how) in expected.items():
            of_ours = (
                found.get(target) or found[f"text_model.{target}" if published else target.removeprefix("text_model.")]
            )
            whole = numbered(shape_of(shape))
            if how == ["T"]:
                whole = whole.T
            elif how:
                begin, end = how[0].split(":")
                whole = whole[int(begin) : int(end)]
            array = of_ours.read()
            assert of_ours.shape == array.shape == whole.shape, name
            assert np.array_equal(
                array[(slice(None), *[0] * (array.ndim - 1))], whole[(slice(None), *[0] * (whole.ndim - 1))]
            )
            assert array.ndim < 2 or np.array_equal(array[0].ravel()[-1], whole[0].ravel()[-1])
    assert set(read.ignored) == tensors.keys() - used


def test_averaged_copies(checkpoint_list, family, variables):
    """Each plain name has its copy, called as diffusers' converter looks for it: without dots."""
    tensors = single_file(checkpoint_list, family)
    plain = [name for name in tensors if name.startswith("model.diffusion_model.")]
    copies = {"model_ema.diffusion_model" + "".join(name.split(".")[2:]): tensors[name] for name in plain}
    marked = tensors | copies | {"model_ema.decay": tensor(()), "model_ema.num_updates": tensor((), "int32")}
    assert len(copies) == COUNTS[family]["unet"]
    without, with_ema = ldm.read(marked, family), ldm.read(marked, family, ema=True)
    assert all(t is tensors[n] for n, t in zip(plain, without.tensors["unet"].values(), strict=True))
    assert all(t is c for t, c in zip(with_ema.tensors["unet"].values(), copies.values(), strict=True))
    assert_total(variables, with_ema.config, "unet", with_ema.tensors["unet"])
    counted = f"({COUNTS[family]['unet']} tensors)"
    assert f"model_ema.* {counted}" in without.ignored
    assert f"model.diffusion_model.* {counted}" in with_ema.ignored


# Network in KerasCV's lists -> component, and how the names of its half of the autoencoder start.
KERASCV = {
    "text_encoder": ("text_encoder", ""),
    "unet": ("unet", ""),
    "decoder": ("vae", ("decoder.", "post_quant")),
    "image_encoder": ("vae_encoder", ("encoder.", "quant")),
}


@pytest.mark.parametrize(("name", "family"), [("kerascv1", "sd1"), ("kerascv2", "sd2")], indirect=["family"])
@pytest.mark.parametrize("network", KERASCV)
def test_kerascv_networks(checkpoint_list, variables, name, family, network):
    """Recognised by number and shapes; every weight fills one variable of ours, and all are filled."""
    (component, start), (_, rows) = KERASCV[network], checkpoint_list(name)[network]
    weights = [
        kerascv_h5.Weight(f"{layer}_{number}/{kind}:0", tensor(shape_of(shape))) for number, layer, kind, shape in rows
    ]
    found, families = kerascv_h5.identify(weights)
    assert found == component and family in families
    source = kerascv_h5.named(weights, component, family, name)
    ours = {n: v for n, v in variables["vae" if start else component].items() if n.startswith(start)}
    assignments, ignored, problems = loader.plan(ours, source, keymaps.KERASCV[component])
    assert not problems and not ignored
    assert assignments.keys() == ours.keys() and len(assignments) == len(rows)
