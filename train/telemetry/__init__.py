"""Measurements of a run: metrics, console, TensorBoard, trackers, stragglers, device monitors."""
