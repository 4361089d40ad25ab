"""Curriculum: which task next, and which groups carry signal."""
