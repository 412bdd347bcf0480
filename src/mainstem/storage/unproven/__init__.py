"""Back ends that never met their real service: tests run them against doubles of its client (`tests/doubles/`)."""
