"""The aim adapter of statsbridge."""

from .adapter import Aim

__all__ = ["Aim"]
