"""Foils that read answers carelessly."""
