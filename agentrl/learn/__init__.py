"""Learning turns groups of trajectories into new weights. Only this package and the engines import torch."""
