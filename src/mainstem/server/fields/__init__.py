"""Fields of requests that several APIs share, and what becomes of each."""
