"""The continual-distillation service: many users' adapters, sampled, scored and trained in one process."""
