"""`agentrl view`: a page over the files of runs. It knows no running code, and writes nothing into a run's folder."""
