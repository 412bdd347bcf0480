"""Fields of requests that several APIs share, and how each is treated."""
