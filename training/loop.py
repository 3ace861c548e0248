"""One training stage: steps under a budget, an average of the weights, resume, a progress line and sample sheets."""

import copy
import math
import os
import time
from typing import NamedTuple

import torch

SEED = 0
AVERAGE = 0.998  # decay of the averaged weights
SAVE_SECONDS, LINE_SECONDS = 300, 30


class Budget(NamedTuple):
    """How long a stage trains: a number of steps, or minutes of wall time where steps is 0."""

    steps: int
    minutes: float

    def fraction(self, step, seconds):
        """Share of the budget that is used, 0..1."""
        return min(1.0, step / self.steps if self.steps else seconds / (60 * self.minutes))


def rate(peak, step, fraction, warmup=100):
    """Learning rate: linear warm-up, constant for half of the budget, then a cosine to a hundredth."""
    decay = 0.5 + 0.5 * math.cos(math.pi * max(0.0, 2 * fraction - 1))
    return peak * min(1.0, (step + 1) / warmup) * (0.01 + 0.99 * decay)


def write_aside(path, write):
    """Calls write(temporary path), then renames: a reader never sees half a file."""
    aside = path.with_name("writing-" + path.name)
    write(aside)
    os.replace(aside, path)


def train(name, network, loss, sheet, folder, budget, peak):
    """Trains `network` and returns its averaged copy, in evaluation mode, and the number of steps it took.

    loss(network, step, fraction) -> float32[]; sheet(averaged network) -> a PIL picture, written to folder/NAME.png;
    peak: highest learning rate. The state lies in folder/NAME.pt and is gone on from where it exists.
    """
    averaged = copy.deepcopy(network).eval().requires_grad_(False)
    pairs = zip(network.parameters(), averaged.parameters(), strict=True)
    weights, averages = zip(*[pair for pair in pairs if pair[0].requires_grad], strict=True)
    optimiser = torch.optim.AdamW(weights, betas=(0.9, 0.98), weight_decay=0.01, fused=True)
    state_file, step, seconds = folder / f"{name}.pt", 0, 0.0
    if state_file.exists():
        state = torch.load(state_file)
        network.load_state_dict(state["network"])
        averaged.load_state_dict(state["averaged"])
        optimiser.load_state_dict(state["optimiser"])
        step, seconds = state["step"], state["seconds"]

    def save():
        parts = {"network": network, "averaged": averaged, "optimiser": optimiser}
        state = {key: part.state_dict() for key, part in parts.items()} | {"step": step, "seconds": seconds}
        write_aside(state_file, lambda path: torch.save(state, path))
        write_aside(folder / f"{name}.png", lambda path: sheet(averaged).save(path, "PNG"))

    clock = saved = printed = time.monotonic()
    recent = []
    while (fraction := budget.fraction(step, seconds)) < 1:
        torch.manual_seed(SEED + step)
        for group in optimiser.param_groups:
            group["lr"] = rate(peak, step, fraction)
        value = loss(network, step, fraction)
        value.backward()
        torch.nn.utils.clip_grad_norm_(weights, 1.0)
        optimiser.step()
        optimiser.zero_grad()
        step += 1
        torch._foreach_lerp_(list(averages), list(weights), 1 - min(AVERAGE, step / (step + 10)))
        recent.append(value.item())
        now = time.monotonic()
        seconds, clock = seconds + now - clock, now
        if now - printed > LINE_SECONDS:
            left = seconds * (1 / max(budget.fraction(step, seconds), 1e-6) - 1)
            mean = sum(recent) / len(recent)
            print(f"{name}: step {step}, loss {mean:.4f}, {seconds / 60:.1f} min, {left / 60:.0f} min left", flush=True)
            printed, recent = now, []
        if now - saved > SAVE_SECONDS:
            save()
            saved = time.monotonic()
    save()
    return averaged, step
