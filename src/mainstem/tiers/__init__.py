"""The tiers below the device: host memory and shared storage, and who moves pages between them and when."""
