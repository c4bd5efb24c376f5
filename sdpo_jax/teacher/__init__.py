"""Who teaches: the teacher's weights, the teacher's context, and the order of a generation batch."""
