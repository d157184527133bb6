"""Causes and suggestions where numbers are not what they should be: not finite, too large, too small, all alike."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple


class Words(NamedTuple):
    """`title`: the kind in a few words."""

    title: str
    causes: tuple[str, ...]
    suggestions: tuple[str, ...]


NUMBERS: Mapping[str, Words] = {
    "nonfinite_parameter": Words(
        "a parameter is NaN or infinite",
        (
            "an earlier step with a non-finite gradient or update",
            "a checkpoint, or an initialisation, that was not finite",
        ),
        (
            "go back to a checkpoint from before this step",
            "skip steps whose gradient norm is not finite",
        ),
    ),
    "nonfinite_activation": Words(
        "a module's output is NaN or infinite",
        (
            "its input is not finite: NaN or infinity in the data, where it is the first module",
            "its arithmetic overflows or is undefined: exp of a large number, log of 0, float16 beyond 65504",
        ),
        (
            "check the batch of this step for NaN and infinity",
            "clamp or rescale what goes into the module; run it in float32",
        ),
    ),
    "nonfinite_loss_outside": Words(
        "the loss is not finite, every module's output is",
        ("the loss function: log of 0, division by 0, or an overflow in it",),
        (
            "use the loss that takes logits (cross_entropy, binary_cross_entropy_with_logits)",
            "clamp what goes into log, sqrt and divisions; check the targets of this batch",
        ),
    ),
    "nonfinite_loss": Words(
        "the loss is NaN or infinite",
        ("the training diverged: the learning rate is too large", "a batch holds NaN, infinity or huge values"),
        (
            "look at the first non-finite activation, gradient or update: sample more densely before this step",
            "lower the learning rate, warm it up, clip gradients",
            "check the batch of this step",
        ),
    ),
    "nonfinite_gradient": Words(
        "a gradient is NaN or infinite",
        (
            "a derivative that does not exist: sqrt or norm at 0, log of 0, 0/0 behind torch.where",
            "an overflow in the backward pass, in float16 above all",
        ),
        (
            "look at what lies between this module and the next: add a small epsilon inside sqrt, norm and log",
            "torch.autograd.set_detect_anomaly(True) names the operation",
        ),
    ),
    "nonfinite_update": Words(
        "the optimizer made a parameter NaN or infinite",
        (
            "the optimizer divides by 0: an eps of 0, or one that is 0 in float16",
            "an infinite or NaN learning rate or weight decay, or one that overflows",
        ),
        (
            "give the optimizer an eps of at least 1e-8 (1e-4 where its state is float16)",
            "look at the learning rate of this step",
        ),
    ),
    "skipped_steps": Words(
        "optimizer steps are skipped",
        ("gradients overflow in float16 at any scale: the loss or an activation is too large",),
        ("look at the largest activations and gradients; use bfloat16, or float32 where it overflows",),
    ),
    "underflow": Words(
        "numbers are lost below float16's smallest one",
        ("float16 without loss scaling", "an optimizer that keeps its state (squares of gradients) in float16"),
        ("use torch.amp.GradScaler, or bfloat16, whose range is float32's", "keep parameters and optimizer in float32"),
    ),
    "exploding_activation": Words(
        "activations explode",
        (
            "weights of this module that are too large: initialisation, or updates too large",
            "inputs that are not scaled, or targets where it is the last module",
            "a residual or recurrent path without normalisation",
        ),
        (
            "initialise by Kaiming or Xavier; normalise between layers",
            "scale the inputs to mean 0 and standard deviation 1",
            "lower the learning rate",
        ),
    ),
    "collapsed_activation": Words(
        "a module's output is the same everywhere",
        (
            "weights that are all 0 or all equal, and stay so",
            "an input that is the same everywhere, or is multiplied by 0",
        ),
        ("look at the parameters of this module and what feeds it", "initialise the weights at random"),
    ),
    "dead_units": Words(
        "ReLU units are dead",
        (
            "a bias that is far below 0, or a learning rate so large that one step threw units beyond the data",
            "inputs of the layer that are not centred, or an initialisation too small",
            "late, in a loss that never fell: nothing to learn, so that a constant is the best that the network can do",
        ),
        (
            "statsbridge.debug.revive_dead_units draws their weights anew",
            "lower the learning rate, initialise by Kaiming, use LeakyReLU or GELU, normalise before the ReLU",
        ),
    ),
    "saturated": Words(
        "sigmoid or tanh is saturated",
        ("inputs of the activation that are too large: initialisation, unscaled data, a large learning rate",),
        (
            "scale down the weights before it (Xavier), or normalise before it",
            "scale the inputs; lower the learning rate; use another activation function inside the network",
        ),
    ),
    "identical_outputs": Words(
        "all samples get the same output",
        (
            "the representation collapsed: units dead or saturated in a layer before, or a bias that outweighs all",
            "the module does not use its input",
        ),
        ("look for the first module with this finding, and at its activations and weights",),
    ),
    "vanishing_gradient": Words(
        "the gradient vanishes",
        (
            "saturated sigmoid or tanh layers, or many layers without a skip connection",
            "weights that are too small, or an output multiplied by a small number",
            "where all gradients are small: a loss that is scaled down",
        ),
        (
            "use ReLU or GELU, skip connections and normalisation; initialise by Kaiming or Xavier",
            "look at gradients along depth, and at what lies where they are lost",
        ),
    ),
    "exploding_gradient": Words(
        "the gradient explodes",
        (
            "weights that are too large: initialisation, or a learning rate too large",
            "a long recurrence, or depth without normalisation",
            "a loss that is summed instead of averaged, or unscaled targets",
        ),
        ("lower the learning rate or warm it up", "initialise by Kaiming or Xavier; normalise between layers"),
    ),
}
