"""Inference engines, which sample the tokens. Only those that need torch import it."""
