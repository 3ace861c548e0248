"""The contract on disk: any change to any file of an export is noticed before anything runs."""

import dataclasses
import hashlib
import json
import shutil

import pytest

from models.errors import InputError
from pipeline import manifest


@pytest.fixture
def copied(tiny_export, tmp_path):
    """A copy of the tiny export to damage."""
    return shutil.copytree(tiny_export, tmp_path / "copied")


@pytest.fixture(scope="module")
def contract(tiny_export):
    return manifest.read(tiny_export)


def test_round_trip(contract, copied):
    """Reading gives back all that was written; the folder is where it was read from and does not count."""
    again = manifest.read(copied)
    assert again == contract and again.folder == copied != contract.folder
    assert again.path("decoder") == copied / "decoder" / "1"
    assert manifest.read(str(copied), 1) == contract
    text = (copied / "manifests" / "1.json").read_text()
    assert manifest.dumps(again) == text and str(copied) not in text
    manifest.verify(again)


def test_hash_is_of_the_canonical_form(contract):
    """Other tools can check it: sorted keys, no spaces, without the hash itself."""
    body = json.loads(manifest.dumps(contract))
    expected = body.pop("sha256")
    canonical = json.dumps(body, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    assert hashlib.sha256(canonical.encode()).hexdigest() == expected


def test_a_flipped_byte_in_any_file_is_noticed(copied, contract):
    """Every file of the export, at its first, middle and last byte."""
    for name in contract.files:
        path = copied / name
        original = path.read_bytes()
        for position in {0, len(original) // 2, len(original) - 1} if original else ():
            damaged = bytearray(original)
            damaged[position] ^= 1
            path.write_bytes(damaged)
            with pytest.raises(InputError, match="damaged: its sha256 is not the manifest's; export again") as error:
                manifest.verify(manifest.read(copied))
            assert str(path) in str(error.value)
        path.write_bytes(original + b"\0")
        with pytest.raises(InputError, match="damaged"):
            manifest.verify(manifest.read(copied))
        path.unlink()
        with pytest.raises(InputError, match=f"{path}: missing; the export is incomplete, export again"):
            manifest.verify(manifest.read(copied))
        path.write_bytes(original)
    manifest.verify(manifest.read(copied))


def test_a_flipped_bit_anywhere_in_the_manifest_is_noticed(copied):
    """A sample of all positions, each with another bit, and every cut at them."""
    path = copied / "manifests" / "1.json"
    original = path.read_bytes()
    for position in [*range(0, len(original), 61), *range(len(original) - 40, len(original))]:
        damaged = bytearray(original)
        damaged[position] ^= 1 << position % 8
        for content in (damaged, original[:position]):
            path.write_bytes(content)
            with pytest.raises(InputError, match=r"manifests/1\.json: damaged") as error:
                manifest.read(copied)
            assert "\n" not in str(error.value) and len(str(error.value)) < 1000
    path.write_bytes(original)
    assert manifest.read(copied).version == 1


@pytest.mark.parametrize(
    "content", [b"", b"[]", b"{}", b"null", b"1", b'{"format": 5}', b"\xff", b"[" * 100_000, b'{"a": 1, "a": 2}']
)
def test_other_contents(copied, content):
    (copied / "manifests" / "1.json").write_bytes(content)
    with pytest.raises(InputError, match="damaged"):
        manifest.read(copied)


def resealed(copied, change):
    """Rewrite the manifest with a change and a hash that fits."""
    path = copied / "manifests" / "1.json"
    body = json.loads(path.read_text())
    change(body)
    path.write_text(json.dumps(body, indent=1, sort_keys=True, ensure_ascii=False) + "\n")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda body: body.update(extra=1), "wrong keys: .*extra"),
        (lambda body: body.pop("spec"), "wrong keys: .*spec"),
        (lambda body: body["spec"].update(height="18"), r"\.spec\.height holds '18'"),
        (lambda body: body["spec"].update(prompts=True), r"\.spec\.prompts holds 'True'"),
        (lambda body: body["spec"].update(prompts=2.0), r"\.spec\.prompts holds '2\.0'"),
        (lambda body: body.update(signatures=[]), r"\.signatures holds '\[\]'"),
        (lambda body: body.update(config=None), r"\.config should be an object"),
    ],
)
def test_wrong_fields_are_named(copied, change, message):
    resealed(copied, change)
    with pytest.raises(InputError, match=message):
        manifest.read(copied)


def test_folders_that_are_no_export(tmp_path, copied):
    for folder, message in (
        (tmp_path / "none", "no such folder; expected an export"),
        (tmp_path, r"not a finished export: it has no manifests/VERSION\.json; export again"),
    ):
        with pytest.raises(InputError, match=message):
            manifest.read(folder)
    with pytest.raises(InputError, match="no version 2; found 1"):
        manifest.read(copied, 2)
    # A killed export: parts without a manifest.
    shutil.rmtree(copied / "manifests")
    with pytest.raises(InputError, match="not a finished export"):
        manifest.read(copied)


def test_versions_are_the_finished_ones(copied):
    for name in ("10.json", "9.json", "x.json", "3.json.tmp", "2.txt"):
        (copied / "manifests" / name).write_text("{}")
    shutil.copytree(copied / "decoder" / "1", copied / "decoder" / "11")
    assert manifest.list_versions(copied) == [1, 9, 10]


def test_parts_that_do_not_fit(contract):
    """Names are the wiring: an output of encode that denoise does not take, or in another shape."""

    def changed(part, signature, **fields):
        signatures = {name: dict(s) for name, s in contract.signatures.items()}
        signatures[part][signature] = dataclasses.replace(signatures[part][signature], **fields)
        return dataclasses.replace(contract, signatures=signatures)

    manifest.check_chain(contract)
    encode = contract.signatures["text_encoder"]["encode"]
    pooled = (*encode.outputs, dataclasses.replace(encode.outputs[0], name="pooled"))
    with pytest.raises(InputError, match="encode feeds denoise, but pooled is not an input of it"):
        manifest.check_chain(changed("text_encoder", "encode", outputs=pooled))
    wider = (dataclasses.replace(encode.outputs[0], shape=(4, 77, 64)), encode.outputs[1])
    with pytest.raises(InputError, match="encode feeds denoise, but context is not an input of it"):
        manifest.check_chain(changed("text_encoder", "encode", outputs=wider))
    with pytest.raises(InputError, match="denoise feeds decode, but latent is not an input of it"):
        manifest.check_chain(changed("diffusion_model", "denoise", outputs=()))


def test_description_says_what_an_export_can_do(contract):
    text = manifest.describe(contract)
    for line in (
        "version 1: tiny (sd1, reference numerics)",
        "18", "14", "2 prompt(s) x 2 image(s)",
        "weights    float32",
        "steps      1..12; defaults: ddim, 4 steps, guidance 3",
        "nothing stored (compiled on loading where asked)",
        "text_encoder/encode",
        "max abs 0, equal",
        "denoise(latent float32[4, 9, 7, 4]",
    ):  # fmt: skip
        assert line in text
