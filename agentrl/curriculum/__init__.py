"""The curriculum chooses the next task and decides which groups carry a learning signal."""

from agentrl.curriculum.sampler import Draw, Sampler, Source

__all__ = ["Draw", "Sampler", "Source"]
