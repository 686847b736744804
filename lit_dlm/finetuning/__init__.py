"""Fine-tuning on answers and on trajectories: SFT, TABOM, dParallel, DPO; pretraining."""
