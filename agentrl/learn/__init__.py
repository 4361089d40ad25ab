"""Learning: from groups of trajectories to new weights. torch is imported only below here and in engines."""
