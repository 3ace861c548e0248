"""A checkpoint with LoRA and textual inversion, exported: what is in it, what it computes, what its pictures say."""

import dataclasses
import json
import re
import shutil

import numpy as np
import pytest
from PIL import Image
from safetensors.numpy import load_file, save_file

import serialize_savedmodels
from models import text_encoder, unet
from models.errors import InputError
from pipeline import export, generate, load, manifest
from pipeline.checkpoints import locate
from pipeline.checkpoints import source as sources
from pipeline.images import png
from pipeline.prompts import tokenizer
from pipeline.savedmodel import publish

VECTORS = np.random.default_rng(3).standard_normal((2, 32)).astype("float32")
# Modules of the tiny checkpoint: file of weights, name, kohya's stem, shape.
MODULES = {
    "q": ("text_encoder/model", "text_model.encoder.layers.1.self_attn.q_proj.weight", (32, 32)),
    "k": ("unet/diffusion_pytorch_model", "mid_block.attentions.0.transformer_blocks.0.attn2.to_k.weight", (64, 32)),
}
STEMS = {
    "q": "lora_te_text_model_encoder_layers_1_self_attn_q_proj",
    "k": "lora_unet_mid_block_attentions_0_transformer_blocks_0_attn2_to_k",
}
ALPHA, RANK, WEIGHT = 4.0, 2, 0.75


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Folder with style.safetensors (LoRA) and learned.safetensors (<Cat-X>, two vectors)."""
    folder = tmp_path_factory.mktemp("additions")
    random = np.random.default_rng(4)
    tensors = {}
    for module, (_, _, (outputs, inputs)) in MODULES.items():
        tensors[f"{STEMS[module]}.lora_down.weight"] = random.standard_normal((RANK, inputs)).astype("float32")
        tensors[f"{STEMS[module]}.lora_up.weight"] = random.standard_normal((outputs, RANK)).astype("float32")
        tensors[f"{STEMS[module]}.alpha"] = np.array(ALPHA, "float32")
    save_file(tensors, folder / "style.safetensors")
    save_file({"<Cat-X>": VECTORS}, folder / "learned.safetensors")
    return folder


@pytest.fixture(scope="module")
def options(files):
    return {"loras": [f"{files / 'style.safetensors'}:{WEIGHT}"], "embeddings": [str(files / "learned.safetensors")]}


@pytest.fixture(scope="module")
def customised(exports, checkpoint_folder, export_spec, options):
    spec = export_spec(prompts=1, images_per_prompt=1)
    export.export(sources.diffusers_source(checkpoint_folder, **options), exports / "customised", spec)
    return exports / "customised"


@pytest.fixture(scope="module")
def by_hand(checkpoint_folder, files, tmp_path_factory):
    """A checkpoint whose files were changed by hand."""
    folder = shutil.copytree(checkpoint_folder, tmp_path_factory.mktemp("checkpoints") / "tiny")
    lora = load_file(files / "style.safetensors")
    for module, (file, name, _) in MODULES.items():
        tensors = load_file(folder / f"{file}.safetensors")
        update = lora[f"{STEMS[module]}.lora_up.weight"] @ lora[f"{STEMS[module]}.lora_down.weight"]
        tensors[name] = tensors[name] + np.float32(WEIGHT * ALPHA / RANK) * update
        if module == "q":
            table = "text_model.embeddings.token_embedding.weight"
            tensors[table] = np.concatenate([tensors[table], VECTORS])
        save_file(tensors, folder / f"{file}.safetensors")
    config = json.loads((folder / "text_encoder" / "config.json").read_text())
    (folder / "text_encoder" / "config.json").write_text(json.dumps(config | {"vocab_size": 49410}))
    return folder


def test_manifest_and_tokenizer_say_what_was_added(customised, files):
    contract = manifest.read(customised)
    digests = [manifest.sha256(files / f"{name}.safetensors") for name in ("style", "learned")]
    assert contract.loras == (manifest.MergedLora("style", digests[0], WEIGHT),)
    assert contract.embeddings == (manifest.AddedEmbedding("<cat-x>", (49408, 49409), digests[1]),)
    assert contract.config.text_encoder.vocab_size == 49410 and contract.checkpoint == "tiny"
    assert f"tokenizer/{tokenizer.ADDED_FILE}" in contract.files
    manifest.verify(contract)
    words = tokenizer.load(customised / "tokenizer")
    assert words.encode("a <CAT-X>").ids[:4].tolist() == [49406, 320, 49408, 49409]
    text = manifest.describe(contract)
    assert "float32, + 0.75 x style" in text and "<cat-x> (2 ids)" in text


def test_a_plain_source_adds_nothing(checkpoint_folder, customised):
    source = sources.diffusers_source(checkpoint_folder)
    assert source.loras == source.embeddings == () and source.config.text_encoder.vocab_size == 49408
    plain = dataclasses.replace(manifest.read(customised), loras=(), embeddings=())
    assert re.search("weights .*", manifest.describe(plain))[0].endswith("float32")


def test_weights_equal_the_checkpoint_changed_by_hand(checkpoint_folder, by_hand, options):
    both = [sources.diffusers_source(checkpoint_folder, **options), sources.diffusers_source(by_hand)]
    assert both[0].config == both[1].config
    for component, build in (("text_encoder", text_encoder.TextEncoder), ("unet", unet.UNet)):
        mine, expected = (build(getattr(source.config, component)) for source in both)
        for source, network in zip(both, (mine, expected), strict=True):
            source.fill(component, [network])
        for a, b in zip(mine.variables, expected.variables, strict=True):
            np.testing.assert_array_equal(a.value, b.value, err_msg=a.path)


def test_prompts_reach_the_new_rows(customised, by_hand):
    """The whole chain, and old clients' serving_default, against the encoder of the changed checkpoint."""
    source = sources.diffusers_source(by_hand)
    network = text_encoder.TextEncoder(source.config.text_encoder)
    source.fill("text_encoder", [network])
    ids = tokenizer.load(customised / "tokenizer").encode_batch(["a <cat-x> on it"])[0]
    assert 49409 in ids
    contract, ones = manifest.read(customised), np.ones((1, 77), "float32")
    encode, serving = (load.function(contract, "text_encoder", name) for name in ("encode", "serving_default"))
    tokens = {"tokens": ids, "negative_tokens": ids, "token_weights": ones, "negative_token_weights": ones}
    expected = np.asarray(network(ids)[0])
    for found in (encode(**tokens)["context"], serving(tokens=ids)["context"]):
        np.testing.assert_allclose(found, expected, rtol=0, atol=2e-5)


def test_pictures_name_the_lora(customised, files, tmp_path):
    functions = load.local(customised)
    chosen = generate.settings(functions.manifest, num_steps=2)
    image = generate.generate(functions, "a <cat-x>", num_steps=2)[0]
    text = png.parameters(functions, "a <cat-x>", None, 0, chosen, 3.0)
    written = Image.open(png.save(image, 0, text, tmp_path)).text["parameters"]
    assert written == text and written.startswith("a <cat-x>\nSteps: 2, ")
    digest = manifest.sha256(files / "style.safetensors")[:12]
    assert written.endswith(f', Merged LoRA: "style {digest} 0.75"')
    plain = dataclasses.replace(functions, manifest=dataclasses.replace(functions.manifest, loras=()))
    assert "LoRA" not in png.parameters(plain, "a <cat-x>", None, 0, chosen, 3.0)


def test_versions_of_one_export_have_one_vocabulary(customised):
    contract = manifest.read(customised)
    files = {name: digest for name, digest in contract.files.items() if not name.endswith(tokenizer.ADDED_FILE)}
    with pytest.raises(InputError, match="has another tokenizer .*versions of one export differ in weights only"):
        publish._check_same_contract(customised, dataclasses.replace(contract, files=files))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"embeddings": ["learned.safetensors:cat"]}, "should be new, 'cat' is in the vocabulary already"),
        ({"embeddings": ["learned.safetensors"] * 2}, "should be new, '<Cat-X>' is in the vocabulary already"),
        ({"embeddings": ["wide.safetensors"]}, "expected vectors of 32 numbers, found 768"),
        (
            {"embeddings": ["style.safetensors"]},
            "expected one tensor, named by its token, or clip_l and clip_g, found 6",
        ),
        ({"loras": ["learned.safetensors"]}, "1 keys fitting no module of this model: <Cat-X>"),
        ({"loras": ["style.safetensors:strong"]}, "expected FILE or FILE:WEIGHT"),
        ({"loras": ["nowhere.safetensors"]}, "no such file"),
    ],
)
def test_bad_input_ends_before_anything_is_built(checkpoint_folder, files, options, message):
    save_file({"<w>": np.zeros((1, 768), "float32")}, files / "wide.safetensors")
    given = {kind: [str(files / option) for option in values] for kind, values in options.items()}
    with pytest.raises(InputError, match=message):
        sources.diffusers_source(checkpoint_folder, **given)


def test_flags(checkpoint_folder, options):
    flags = serialize_savedmodels.FLAGS
    names = ("lora", "embedding", "checkpoint", "random_weights")
    kept = {name: flags[name].value for name in names} if flags.is_parsed() else None
    flags.mark_as_parsed()
    try:
        flags.lora, flags.embedding, flags.checkpoint = *options.values(), str(checkpoint_folder)
        source = serialize_savedmodels.find_source(sources, locate)
        assert [lora.weight for lora in source.loras] == [WEIGHT] and source.embeddings[0].token == "<cat-x>"
        assert serialize_savedmodels.default_output_dir(source) == "exports/tiny-style-embedded"
        flags.random_weights = True
        with pytest.raises(InputError, match="^--lora changes a checkpoint; leave --kerascv and --random_weights out$"):
            serialize_savedmodels.find_source(sources, locate)
    finally:
        for name in names:
            flags[name].value = kept[name] if kept else flags[name].default
