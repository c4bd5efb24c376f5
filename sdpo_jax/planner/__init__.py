"""What a run would cost on a TPU slice, asked of the TPU compiler on a machine that has none."""
