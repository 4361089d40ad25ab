"""Shooting ranges: small environments, one for each kind of work a verifier grades, on which attacks are tried.

A range brings tasks, tools, an expert and wrong work; the verifier is put in: one of ours, or a naive foil.
"""
