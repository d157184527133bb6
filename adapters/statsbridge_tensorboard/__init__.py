"""The TensorBoard adapter of statsbridge: event files in a folder of their own, beside the user's."""

from .adapter import TensorBoard

__all__ = ["TensorBoard"]
