"""Memory, time and cost of a run on a TPU slice, from the TPU compiler on a machine without TPUs."""
