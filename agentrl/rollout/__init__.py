"""Rollouts: rendering, engines, episodes joined to engines, and the scheduler."""
