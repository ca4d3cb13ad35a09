"""Parts of benchmarks that run in separate processes: other libraries, and a bare training step."""
