"""The benchmarks of `parallel3d bench`: our collectives against gloo and MPI, interleaved in one run."""
