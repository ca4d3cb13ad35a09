"""What a run says of itself: metrics, trackers, reports, model cards."""
