"""Bridges to programs of others; each imports its peer only when it is used."""
