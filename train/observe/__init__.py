"""Records of a run for people and tools: metrics, trackers, reports, model cards."""
