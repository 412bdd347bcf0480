"""The core: the C++ tree (`mainstem._core`, sources in csrc/) and the slow, obvious model that tests compare it with."""
