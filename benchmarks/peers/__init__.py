"""Parts of benchmarks that run in separate processes: other libraries, and the bound of a step."""
