"""What a server shows of itself: metrics, traces, recordings, explanations and the live page."""
