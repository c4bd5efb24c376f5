"""Where the service keeps adapters, their versions, samples and requests."""
