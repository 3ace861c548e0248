"""Time KerasCV's own Stable Diffusion as its users call it: the worker behind `benchmark.py --kerascv`.

Run by `pipeline.benchmark.timing.isolated`, with the file of the request as its argument.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from pipeline import cli  # noqa: E402
from pipeline.benchmark import timing  # noqa: E402
from pipeline.checkpoints import kerascv  # noqa: E402
from pipeline.prompts import tokenizer  # noqa: E402


def load(row: dict):
    """KerasCV's class as a function to be timed; a stage ends where its class first calls the next network."""
    encoder = tokenizer.load(Path(row["tokenizer"]))
    model = kerascv.stable_diffusion(row["height"], row["width"], encoder, row["random_seed"], row["jit_compile"])
    call: dict = {}  # of the call that is running: its lap, and the stages that have ended

    def before(network, stage: str) -> None:
        predict = network.predict_on_batch  # gives NumPy arrays, so whatever was computed before it is done

        def announced(inputs):
            if stage not in call["ended"]:
                call["ended"].add(stage)
                call["lap"](stage)
            return predict(inputs)

        network.predict_on_batch = announced

    before(model.diffusion_model, "text_encoder")
    before(model.decoder, "diffusion")

    def draw(lap):
        call.update(lap=lap, ended=set())
        images = model.text_to_image(
            row["prompt"],
            batch_size=row["images"],
            num_steps=row["settings"]["num_steps"],
            unconditional_guidance_scale=row["settings"]["guidance_scale"],
            seed=row["seed"],
        )
        lap("decoder")
        return images

    return draw


def main(argv):
    return timing.answer(argv[1], load)


if __name__ == "__main__":
    cli.run(main)
