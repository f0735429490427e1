"""What `parallel3d bench` measures: ours beside what users would pick instead, taking turns in one run."""
