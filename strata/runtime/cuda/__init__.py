"""The CUDA backend: memory, loading, experts and captured steps. Imported only to run on a GPU."""
