"""llama.cpp as a server of the benchmark: node-llama-cpp, which carries builds for each kind of CPU, behind HTTP."""
