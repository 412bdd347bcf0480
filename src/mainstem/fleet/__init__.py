"""Many engines and one front: Ray Serve runs them, Mainstem chooses which one answers."""
