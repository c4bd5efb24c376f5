"""The service over HTTP: everything here speaks of requests and answers; what they mean is in `sdpo_jax.serving`."""
