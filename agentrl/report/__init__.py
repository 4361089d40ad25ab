"""Reports on runs, made from the files they leave: in the terminal, in TensorBoard, as text and as pages."""
