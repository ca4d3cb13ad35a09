"""Measurements of a run: metrics, console, TensorBoard, stragglers, device monitors."""
