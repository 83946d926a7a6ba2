"""Use a model from Python: `kiloword.load(folder)` returns a `Matcher`."""

from kiloword.api.load import load
from kiloword.api.matcher import Matcher

__all__ = ["Matcher", "load"]
