"""Engines: who samples the tokens. torch is imported only in those that need it."""
