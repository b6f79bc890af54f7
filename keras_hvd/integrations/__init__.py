"""Programs of others that train on all ranks: KerasTuner and TFX."""
