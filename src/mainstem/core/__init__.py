"""The core: the C++ tree (`mainstem._core`, sources in csrc/) and a slow, obvious model to test it against."""
