"""The core: the C++ tree (`mainstem._core`, sources in csrc/) and a slow, obvious model for tests to compare with."""
