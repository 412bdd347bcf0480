"""The HTTP APIs: the bodies of requests and of answers, one API by one."""
