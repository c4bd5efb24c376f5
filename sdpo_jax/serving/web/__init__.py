"""The HTTP layer of the service: requests and responses; `sdpo_jax.serving` does the work."""
