"""Curriculum: which task next, and which groups carry signal."""

from agentrl.curriculum.sampler import Draw, Sampler, Source, make

__all__ = ["Draw", "Sampler", "Source", "make"]
