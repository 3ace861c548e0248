"""Checkpoints as sources of an export: what the user asks to change goes before what the files say.

Single files as sources: tests/test_ldm.py.
"""

import dataclasses

import pytest

from models.errors import InputError
from pipeline.checkpoints import diffusers_folder
from pipeline.checkpoints import source as sources


@pytest.mark.parametrize("given", [None, "epsilon", "v_prediction"])
def test_prediction_type_of_a_folder(checkpoint_folder, capsys, given):
    """An explicit one wins, with a notice where it differs; nothing else changes."""
    said = diffusers_folder.read_config(checkpoint_folder)
    source = sources.diffusers_source(checkpoint_folder, prediction_type=given)
    scheduler = dataclasses.replace(said.scheduler, prediction_type=given or "epsilon")
    assert source.config == dataclasses.replace(said, scheduler=scheduler)
    notice = "notice: --prediction_type v_prediction is used, although the checkpoint says epsilon"
    assert (notice in capsys.readouterr().out) is (given == "v_prediction")


def test_another_vae_makes_the_own_one_needless(damaged_checkpoint, checkpoint_folder):
    (damaged_checkpoint / "vae" / "diffusion_pytorch_model.safetensors").unlink()
    with pytest.raises(InputError, match="expected diffusion_pytorch_model.safetensors"):
        sources.diffusers_source(damaged_checkpoint)
    source = sources.diffusers_source(damaged_checkpoint, vae=str(checkpoint_folder / "vae"))
    assert source.vae.name == "vae" and source.config == diffusers_folder.read_config(checkpoint_folder)


def test_a_file_that_is_no_checkpoint(tmp_path):
    (tmp_path / "model.safetensors").write_bytes(b"12")
    with pytest.raises(InputError, match=r"model\.safetensors: not a usable safetensors file"):
        sources.single_file_source(tmp_path / "model.safetensors")
    with pytest.raises(InputError, match=r"model\.ckpt: pickle files can run code and are not read; pass --allow_pick"):
        sources.single_file_source(tmp_path / "model.ckpt")
