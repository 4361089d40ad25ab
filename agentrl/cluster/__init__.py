"""Rollouts on Ray: the only importer of ray, and imported only where a recipe has a `cluster`."""
