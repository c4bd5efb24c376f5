"""The storage of the service: adapters, their versions, samples and requests."""
