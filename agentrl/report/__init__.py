"""Reports on runs, made from the files they leave: progress in the terminal, TensorBoard, episodes as text, the viewer's page."""
