"""What is trained beside a frozen model."""
