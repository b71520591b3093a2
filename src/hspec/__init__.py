"""H-Spec: parallel speculative decoding without a drafter-side KV cache."""

from hspec.api import generate, load_drafter, stream
from hspec.decoding.params import SamplingParams
from hspec.errors import HSpecError, UsageError
from hspec.targets.sources import load_target

__version__ = "0.1.0"
__all__ = ["HSpecError", "SamplingParams", "UsageError", "generate", "load_drafter", "load_target", "stream"]
