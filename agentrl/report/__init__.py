"""Reports: live progress in the terminal, and pages about finished runs."""
