"""The tiers below the device, host memory and shared storage, and the controller that moves pages between them."""
