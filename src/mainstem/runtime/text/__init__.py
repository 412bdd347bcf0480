"""From text and images to tokens, and back."""
