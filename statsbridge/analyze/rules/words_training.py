"""Causes and suggestions where the training does not do what it should: what it reaches, its steps, its loss."""

from __future__ import annotations

from collections.abc import Mapping

from .words_numbers import Words

TRAINING: Mapping[str, Words] = {
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
    "stale_outputs": Words(
        "outputs repeat although the weights move",
        (
            "the module computes with a copy of its weights that was made once (cached, quantised, detached)",
            "another copy of the model is trained than the one that runs",
        ),
        ("make the copy anew in each forward pass", "look at where the forward pass takes its weights from"),
    ),
    "gradient_accumulating": Words(
        "gradients add up from step to step",
        ("optimizer.zero_grad() is missing, or comes between backward() and step()",),
        ("call optimizer.zero_grad() once for each optimizer step, before backward()",),
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
        (
            "it is not called in forward()",
            "it gets nothing to do: an expert that is chosen for no sample, a branch that is not taken",
            "it is used for inference alone",
        ),
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
    "never_stepped": Words(
        "no optimizer steps",
        (
            "optimizer.step() is missing, or stands behind a condition that never holds",
            "the optimizer holds the parameters of another model: a copy, or the one before it was made anew",
        ),
        (
            "call optimizer.step() after backward(), with an optimizer made from this model's parameters",
            "where many backward passes make one step, call run.step() once for each optimizer step",
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
    "outside_baseline": Words(
        "a number is outside of what the good run has",
        ("what differs between the two: settings, data, code",),
        ("statsbridge compare GOOD RUN lists every number that parts, and what was set differently",),
    ),
}
