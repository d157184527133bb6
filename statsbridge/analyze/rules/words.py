"""What each kind of finding probably comes from, and what to try: the likeliest first."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple


class Words(NamedTuple):
    """`title`: the kind in a few words."""

    title: str
    causes: tuple[str, ...]
    suggestions: tuple[str, ...]


#: Events of the collector that say what statistics cannot show.
FACTS = frozenset(
    {
        "eval_mode",
        "module_eval",
        "no_optimizer",
        "parameter_replaced",
        "running_statistics_unchanged",
        "identical_outputs",
        "optimizer_step_skipped",
    }
)

WORDS: Mapping[str, Words] = {
    "nonfinite_loss": Words(
        "the loss is NaN or infinite",
        ("the training diverged: the learning rate is too large", "a batch holds NaN, infinity or huge values"),
        (
            "look at the first non-finite activation, gradient or update: sample more densely before this step",
            "lower the learning rate, warm it up, clip gradients",
            "check the batch of this step",
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
    "loss_spike": Words(
        "the loss jumps",
        ("one odd batch: wrong labels, unscaled or corrupt samples", "the learning rate is at its limit"),
        (
            "look at the batch of this step",
            "clip gradients; lower the learning rate or warm it up",
        ),
    ),
    "loss_not_decreasing": Words(
        "the loss does not fall",
        (
            "the learning rate is far too small or far too large",
            "labels do not belong to their inputs (shuffled apart)",
            "the sign of the loss is wrong, or gradients do not reach the parameters",
        ),
        (
            "overfit one batch: statsbridge.debug.overfit_one_batch",
            "run a learning-rate range test",
            "look at some samples with their labels as the model gets them",
        ),
    ),
    "loss_flat": Words(
        "the loss stands still from the start",
        (
            "the optimizer does not change what the loss depends on",
            "the output does not depend on the parameters: dead, saturated or detached",
        ),
        (
            "check that the optimizer was given this model's parameters and steps",
            "look at the updates and the gradients along depth",
        ),
    ),
    "loss_oscillating": Words(
        "the loss swings to and fro",
        (
            "the learning rate is too large: each step jumps over the minimum",
            "batches alternate between two kinds of data",
        ),
        ("divide the learning rate by 3 to 10", "shuffle the data"),
    ),
    "initial_loss": Words(
        "the first loss is far from ln C",
        (
            "the outputs are too large at the start: initialisation, unscaled inputs",
            "the loss gets probabilities where it wants logits, or is summed instead of averaged",
        ),
        ("scale down the last layer's initial weights", "check what the loss function expects"),
    ),
    "dead_units": Words(
        "ReLU units are dead",
        (
            "a bias that is far below 0, or a learning rate so large that one step threw units beyond the data",
            "inputs of the layer that are not centred, or an initialisation too small",
        ),
        (
            "statsbridge.debug.revive_dead_units draws their weights anew",
            "lower the learning rate, initialise by Kaiming, use LeakyReLU or GELU, normalise before the ReLU",
        ),
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
    "saturated": Words(
        "sigmoid or tanh is saturated",
        ("inputs of the activation that are too large: initialisation, unscaled data, a large learning rate",),
        (
            "scale down the weights before it (Xavier), or normalise before it",
            "scale the inputs; lower the learning rate; use another activation function inside the network",
        ),
    ),
    "stale_outputs": Words(
        "outputs repeat although the weights move",
        (
            "the module computes with a copy of its weights that was made once (cached, quantised, detached)",
            "another copy of the model is trained than the one that runs",
        ),
        ("make the copy anew in each forward pass", "look at where the forward pass takes its weights from"),
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
    "gradient_accumulating": Words(
        "gradients add up from step to step",
        ("optimizer.zero_grad() is missing, or comes between backward() and step()",),
        ("call optimizer.zero_grad() once for each optimizer step, before backward()",),
    ),
    "underflow": Words(
        "gradients are lost below float16's smallest number",
        ("float16 without loss scaling",),
        ("use torch.amp.GradScaler, or bfloat16, whose range is float32's",),
    ),
    "update_too_large": Words(
        "updates are too large",
        ("the learning rate is too large, for this parameter group or for all", "gradients are not clipped"),
        ("divide the learning rate by 3 to 10, or warm it up", "clip the gradient norm"),
    ),
    "update_too_small": Words(
        "updates are next to nothing",
        ("the learning rate is far too small, for this parameter group or for all",),
        ("run a learning-rate range test; look at the parameter groups of the optimizer",),
    ),
    "update_zero": Words(
        "the optimizer does not move a parameter",
        ("the learning rate is 0, for its parameter group or for all",),
        ("look at the learning rate of each parameter group, and at what the scheduler makes of it",),
    ),
    "update_rounded_away": Words(
        "updates are lost in rounding",
        ("parameters in bfloat16 or float16, and updates smaller than their last digit",),
        (
            "keep the parameters in float32 and use autocast, or an optimizer that has float32 copies",
            "a larger learning rate moves them, if it is not too large otherwise",
        ),
    ),
    "no_gradient": Words(
        "a trainable parameter gets no gradient",
        (
            "the graph is cut behind it: detach(), .data, no_grad(), an argmax or a conversion to numpy",
            "activation checkpointing (use_reentrant=True) whose inputs need no gradient",
            "the parameter is made anew in each forward pass, or its output is not used",
        ),
        (
            "look at what lies between this module and the next one towards the loss",
            "freeze it with requires_grad_(False) if that is meant",
        ),
    ),
    "unused_module": Words(
        "a trainable module does not run",
        ("it is not called in forward()", "it is used for inference alone"),
        ("call it, remove it, or freeze it",),
    ),
    "zero_gradient": Words(
        "a gradient is exactly 0",
        (
            "what follows is dead or clamped: ReLU units that are off, clamp() at its limits, a mask of 0",
            "an operation without slope: round(), sign(), a comparison",
            "its input is 0 throughout: dead units before it, of a ReLU that is a function and no module perhaps",
        ),
        (
            "look at the modules before and after it: dead units, zeros, hard limits",
            "use a straight-through estimator for rounding",
        ),
    ),
    "no_optimizer": Words(
        "no optimizer holds a parameter that has a gradient",
        (
            "the optimizer was made before the module was added, or from part of the model only",
            "the parameter was replaced after the optimizer was made",
        ),
        (
            "make the optimizer from model.parameters() when the model is complete, or use add_param_group()",
            "freeze it with requires_grad_(False) if that is meant",
        ),
    ),
    "parameter_replaced": Words(
        "a parameter is not the one that the optimizer holds",
        (
            "it was assigned anew (self.weight = nn.Parameter(…), .to() or load after the optimizer was made)",
            "it is made in forward()",
        ),
        ("change parameters in place (copy_ under no_grad), or make the optimizer afterwards",),
    ),
    "running_statistics_unchanged": Words(
        "running statistics of a normalisation never change",
        ("momentum=0", "running statistics that are written over in each step"),
        ("give it momentum=0.1, or None for a plain average",),
    ),
    "identical_outputs": Words(
        "all samples get the same output",
        (
            "the representation collapsed: units dead or saturated in a layer before, or a bias that outweighs all",
            "the module does not use its input",
        ),
        ("look for the first module with this finding, and at its activations and weights",),
    ),
    "eval_mode": Words(
        "the model is in eval mode while it trains",
        ("model.eval() after a validation, without model.train() before the next step",),
        ("call model.train() at the start of each epoch",),
    ),
    "module_eval": Words(
        "a module is in eval mode while the model trains",
        ("eval() was called on it, or train() is overridden", "it is meant to be frozen"),
        ("call train() on it, or freeze its parameters too",),
    ),
    "skipped_steps": Words(
        "optimizer steps are skipped",
        ("gradients overflow in float16 at any scale: the loss or an activation is too large",),
        ("look at the largest activations and gradients; use bfloat16, or float32 where it overflows",),
    ),
    "outside_baseline": Words(
        "a number is outside of what the good run has",
        ("what differs between the two: settings, data, code",),
        ("statsbridge compare GOOD RUN lists every number that parts, and what was set differently",),
    ),
}
