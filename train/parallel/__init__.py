"""On what device, split over which ranks, and updated how."""
